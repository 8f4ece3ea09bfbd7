"""Reads a checkpoint's metadata without running or building anything that the metadata names.

torch stores the metadata, `.metadata`, as a pickle, and a pickle can call any function. Python's unpickler makes real
objects; even if it admits few classes, a pickle can set their attributes for the whole process (opcode BUILD), or crash
the process with a huge memo number or a deeply nested key. Here nothing is imported, called, built or changed: an
object is a `Built`, the class's name with the pickled description, and every value is checked before use. Only the
opcodes that lists of tensors need are known; Python's `pickletools` describes each of them. Work and memory are
proportional to the length of the pickle, and nothing recurses.
"""

import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file
from mtrain.base.tensor_slice import Sizes, TensorSlice

_SAME_MODULES = {"pathlib._local": "pathlib", "__builtin__": "builtins"}
"""Module names of Python 3.13 and of protocol 2 -> their names in other versions."""
_LONGEST_SHOWN = 100
"""Largest number of a name's characters in a message."""


class PickleError(ValueError):
    """The pickle is damaged, or asks for something that is not allowed."""


@dataclass(eq=False, slots=True)
class Named:
    """Class or function named by a pickle, as `module.name`."""

    name: str


@dataclass(eq=False, slots=True)
class Built:
    """Object described by a pickle; compared and hashed by identity, so that hashing a key costs nothing."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None
    """Fields of the object, once BUILD has set them."""


@dataclass(eq=False, slots=True)
class Saved:
    """Placeholder for the bytes of a tensor in a torch.save record (a persistent id)."""

    id: Any


def read_inert(raw: bytes, allowed: Collection[str]) -> Any:
    """Reads a pickle, which may only use names in `allowed`, as plain data; bytes after its end are an error.

    Returns:
        None, bool, int, float, str, bytes, tuple, list, dict (with str, int and `Built` keys), `Built`, `Named` or
            `Saved`. A set becomes the list of its elements.
    """
    return _Machine(raw, allowed).run()


class _Machine:
    """Interpreter of one pickle: its stack, marks and memo."""

    def __init__(self, raw: bytes, allowed: Collection[str]) -> None:
        self._raw, self._at, self._allowed = raw, 0, allowed
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """Height of the stack at each open mark."""
        self.memo: dict[int, Any] = {}  # a dict, so that a huge index costs no more than a small one
        self._names: dict[str, Named] = {}

    def run(self) -> Any:
        steps = _STEPS
        try:
            while (code := self._raw[self._at]) != _STOP:
                self._at += 1
                steps[code](self)
        except IndexError:  # from the stack, the marks or the bytes
            self._refuse("is truncated, or pops more from its stack than it has pushed")
        except KeyError as fault:
            self._refuse(f"refers to {str(fault)[:_LONGEST_SHOWN]}, which it has not stored")
        except (UnicodeDecodeError, struct.error) as fault:
            self._refuse(f"has a malformed text or number ({fault})")
        if self._at + 1 != len(self._raw):
            self._refuse("continues after its end")
        if len(self.stack) != 1 or self.marks:
            self._refuse("leaves something on its stack")
        return self.stack[0]

    def _refuse(self, reason: str) -> NoReturn:
        raise PickleError(f"its pickle {reason}, at byte {self._at}")

    def refuse_opcode(self) -> None:
        self._refuse(f"contains the opcode {self._raw[self._at - 1]:#04x}, which is not allowed")

    def take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._raw):
            self._refuse("is truncated")
        return self._raw[begin : self._at]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def sized(self, size: int) -> bytes:
        """Reads bytes after their length, a number of `size` bytes."""
        return self.take(self.number(size))

    def pop(self) -> Any:
        # an opcode may not reach below an open mark, as in the C unpickler
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError
        return self.stack.pop()

    def pop_several(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _top(self, kind: type[Any]) -> Any:
        top = self.pop()
        if type(top) is not kind:
            changed = top.name if type(top) is Named else f"a value of type {type(top).__name__}"
            self._refuse(f"changes {changed} instead of an object, list or dict that it has made")
        self.stack.append(top)
        return top

    def extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        target = self._top(dict)
        if len(pairs) % 2:
            self._refuse("has a key without a value")
        for number in range(0, len(pairs), 2):
            if type(pairs[number]) not in (str, int, Built):  # hashing a deeply nested tuple would crash the process
                self._refuse(f"has a key of type {type(pairs[number]).__name__}")
            target[pairs[number]] = pairs[number + 1]

    def memoize(self, size: int = 0) -> None:
        """Stores the topmost value under an index of `size` bytes that follows, or for 0 under the next free one."""
        top = self.stack[-1]
        # the next free index is the memo's size, as in Python's unpickler
        self.memo[self.number(size) if size else len(self.memo)] = top

    def name_in_text(self) -> None:
        """Pushes a name that follows as two lines, module and name."""
        ends = [self._raw.find(b"\n", self._at)]
        ends.append(self._raw.find(b"\n", ends[0] + 1) if ends[0] >= 0 else -1)
        if ends[1] < 0:
            self._refuse("is truncated")
        module, name = self._raw[self._at : ends[0]].decode(), self._raw[ends[0] + 1 : ends[1]].decode()
        self._at = ends[1] + 1
        self._push_name(module, name)

    def name_on_stack(self) -> None:
        module, name = self.pop_several(2)
        if type(name) is not str or type(module) is not str:
            self._refuse("has a name that is not text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        full = f"{_SAME_MODULES.get(module, module)}.{name}"
        if full not in self._allowed:
            shown = full[:_LONGEST_SHOWN].encode("unicode_escape").decode()
            raise PickleError(f"it asks for {shown}, which is not allowed")
        # one object per name, however often the name occurs
        self.stack.append(self._names.setdefault(full, Named(full)))

    def call(self) -> None:
        """Pushes a placeholder for the result of a call with a tuple of arguments."""
        function, arguments = self.pop_several(2)
        if type(function) is not Named or type(arguments) is not tuple:
            self._refuse("calls something other than a name, or without a tuple of arguments")
        if function.name == "collections.OrderedDict" and not arguments:
            self.stack.append({})  # filled by the opcodes that follow
        elif function.name == "builtins.set" and len(arguments) == 1 and type(arguments[0]) is list:
            self.stack.append(arguments[0])
        else:
            self.stack.append(Built(function.name, arguments))

    def give_state(self) -> None:
        state = self.pop()
        target = self._top(Built)
        if target.state is not None:
            self._refuse(f"describes a {target.name} twice")
        target.state = state


_STOP = ord(".")
_Step = Callable[[_Machine], object]


def _pushing(value_of: Callable[[_Machine], Any]) -> _Step:
    return lambda machine: machine.stack.append(value_of(machine))


_KNOWN: dict[bytes, _Step] = {
    b"\x80": lambda machine: machine.take(1),  # PROTO: opcodes mean the same in protocol 2 and later ones
    b"\x95": lambda machine: machine.take(8),  # FRAME: useful only to a reader of a pipe
    b"N": _pushing(lambda machine: None),
    b"\x88": _pushing(lambda machine: True),
    b"\x89": _pushing(lambda machine: False),
    b")": _pushing(lambda machine: ()),
    b"]": _pushing(lambda machine: []),
    b"\x8f": _pushing(lambda machine: []),  # EMPTY_SET
    b"}": _pushing(lambda machine: {}),
    b"K": _pushing(lambda machine: machine.number(1)),
    b"M": _pushing(lambda machine: machine.number(2)),
    b"J": _pushing(lambda machine: machine.number(4, signed=True)),
    b"\x8a": _pushing(lambda machine: machine.number(machine.number(1), signed=True)),
    b"G": _pushing(lambda machine: struct.unpack(">d", machine.take(8))[0]),
    b"\x8c": _pushing(lambda machine: machine.sized(1).decode()),
    b"X": _pushing(lambda machine: machine.sized(4).decode()),
    b"C": _pushing(lambda machine: machine.sized(1)),
    b"B": _pushing(lambda machine: machine.sized(4)),
    b"(": lambda machine: machine.marks.append(len(machine.stack)),
    b"0": _Machine.pop,
    b"\x85": _pushing(lambda machine: tuple(machine.pop_several(1))),
    b"\x86": _pushing(lambda machine: tuple(machine.pop_several(2))),
    b"\x87": _pushing(lambda machine: tuple(machine.pop_several(3))),
    b"t": _pushing(lambda machine: tuple(machine.pop_to_mark())),
    b"a": lambda machine: machine.extend(machine.pop_several(1)),
    b"e": lambda machine: machine.extend(machine.pop_to_mark()),
    b"\x90": lambda machine: machine.extend(machine.pop_to_mark()),  # ADDITEMS, to a set
    b"s": lambda machine: machine.set_items(machine.pop_several(2)),
    b"u": lambda machine: machine.set_items(machine.pop_to_mark()),
    b"\x94": _Machine.memoize,
    b"q": lambda machine: machine.memoize(1),
    b"r": lambda machine: machine.memoize(4),
    b"h": _pushing(lambda machine: machine.memo[machine.number(1)]),
    b"j": _pushing(lambda machine: machine.memo[machine.number(4)]),
    b"c": _Machine.name_in_text,
    b"\x93": _Machine.name_on_stack,
    b"R": _Machine.call,
    b"\x81": _Machine.call,  # NEWOBJ: an object of a class, before its fields
    b"b": _Machine.give_state,
    b"Q": _pushing(lambda machine: Saved(machine.pop())),  # BINPERSID: data outside the pickle
}
_STEPS: tuple[_Step, ...] = tuple(_KNOWN.get(bytes([code]), _Machine.refuse_opcode) for code in range(256))


_METADATA = ".metadata"
_MOST_BYTES = 1 << 28
"""Largest metadata, which list about two million slices."""
_MOST_AXES = 64
"""Torch's limit on axes."""
_MOST_ELEMENTS = 1 << 63
_LONGEST_NAME = 255
"""Limit on bytes in a file's name."""
_LONGEST_KEY = 1000
"""Limit on characters in a tensor's name."""
_IN_TORCH = "torch.distributed.checkpoint."
# every dtype of the installed torch, under all of its names (torch.half and torch.float16)
_DTYPES = {f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_ALLOWED = {
    *_DTYPES,
    "builtins.set",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    f"{_IN_TORCH}filesystem._StorageInfo",
    f"{_IN_TORCH}filesystem._StoragePrefix",
    f"{_IN_TORCH}metadata.BytesStorageMetadata",
    f"{_IN_TORCH}metadata.ChunkStorageMetadata",
    f"{_IN_TORCH}metadata.Metadata",
    f"{_IN_TORCH}metadata.MetadataIndex",
    f"{_IN_TORCH}metadata.StorageMeta",
    f"{_IN_TORCH}metadata.TensorProperties",
    f"{_IN_TORCH}metadata.TensorStorageMetadata",
    f"{_IN_TORCH}metadata._MEM_FORMAT_ENCODING",
    f"{_IN_TORCH}planner.SavePlan",  # megatron-core's own writer adds its plans
    f"{_IN_TORCH}planner.TensorWriteData",
    f"{_IN_TORCH}planner.WriteItem",
    f"{_IN_TORCH}planner.WriteItemType",
}
"""Names that the metadata may use."""


class SavedSlice(NamedTuple):
    """Slice of a global tensor, and where its bytes are."""

    at: TensorSlice
    file: str
    """Plain name of a file in the checkpoint's folder."""
    start_bytes: int
    length_bytes: int
    """Length of the record, including what torch.save writes around the values."""


class GlobalTensor(NamedTuple):
    dtype: torch.dtype
    shape: Sizes
    slices: tuple[SavedSlice, ...]
    """Saved slices, with distinct offsets and inside the shape."""


class TensorMetadata(NamedTuple):
    """Validated metadata of a checkpoint."""

    tensors: dict[str, GlobalTensor]
    non_tensors: set[str]
    """Names of saved objects other than tensors, which cannot be read."""


def read_metadata(folder: Path) -> TensorMetadata:
    """Reads a checkpoint's list of tensors in `torch_dist` format; refuses metadata that are damaged or too long, name
    code or files elsewhere, or contradict themselves."""
    path = folder / _METADATA
    try:
        return _tensor_metadata(read_inert(read_plain_file(path, _MOST_BYTES), _ALLOWED))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise DataError(f"{path} is not a list of tensors: {fault}; restore the checkpoint or use another") from fault
    except MemoryError as fault:
        raise DataError(f"{path} does not fit into memory; restore the checkpoint or use another") from fault


def _tensor_metadata(content: Any) -> TensorMetadata:
    metadata = _fields(content, "metadata.Metadata")
    saved, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(saved, dict) or not isinstance(storage, dict):
        raise ValueError("it has no names of tensors, or no files")
    locations = _locations(storage)
    tensors: dict[str, GlobalTensor] = {}
    non_tensors = set()
    for key, facts in saved.items():
        # isprintable, because messages show the name on one line
        if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
            raise ValueError(f"it has {repr(key)[:_LONGEST_NAME]} as a name")
        if isinstance(facts, Built) and facts.name == f"{_IN_TORCH}metadata.BytesStorageMetadata":
            # listed but never read, because their bytes are another pickle
            non_tensors.add(key)
        else:
            tensors[key] = _tensor(key, _fields(facts, "metadata.TensorStorageMetadata"), locations)
    return TensorMetadata(tensors, non_tensors)


_Locations: TypeAlias = dict[tuple[str, Sizes], tuple[str, int, int]]
"""(key, offsets) -> (file, first byte, length)."""


def _locations(storage: Mapping[Any, Any]) -> _Locations:
    """Returns where all slices are; checks all files, even those that no tensor refers to."""
    locations: _Locations = {}
    for index, storage_info in storage.items():
        name, info = _fields(index, "metadata.MetadataIndex"), _fields(storage_info, "filesystem._StorageInfo")
        key, offsets = name.get("fqn"), name.get("offset")
        if not isinstance(key, str):
            raise ValueError("it has a slice without a name")
        file = _plain_name(info.get("relative_path"))
        # torch may compress or encode a file, which can then not be mapped as a tensor
        if info.get("transform_descriptors"):
            raise ValueError(f"{file} is compressed or encoded, but only a plain file can be read")
        begin, length = _whole_number(info.get("offset")), _whole_number(info.get("length"))
        if offsets is not None:  # None: not a tensor
            locations[key, _sizes(offsets)] = file, begin, length
    return locations


def _plain_name(file: Any) -> str:
    if not isinstance(file, str):
        raise ValueError(f"it names a file by a value of type {type(file).__name__}")
    # a plain name cannot lead out of the checkpoint's folder
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(file.encode()) > _LONGEST_NAME:
        raise ValueError(f"it names {file[:_LONGEST_NAME]!r}, which is not a plain file of the checkpoint")
    return file


def _tensor(key: str, facts: Mapping[str, Any], locations: _Locations) -> GlobalTensor:
    properties, chunks = facts.get("properties"), facts.get("chunks")
    # TensorProperties pickles as a tuple whose first element is the dtype (its __getstate__)
    if not isinstance(properties, Built) or not isinstance(properties.state, tuple) or not properties.state:
        raise ValueError(f"{key} has no properties")
    named = properties.state[0]
    if not isinstance(named, Named) or named.name not in _DTYPES:
        raise ValueError(f"{key} has no dtype")
    shape = _sizes(facts.get("size"))
    if not isinstance(chunks, list):
        raise ValueError(f"{key} has no list of slices")
    slices: dict[Sizes, SavedSlice] = {}
    for chunk in chunks:
        fields = _fields(chunk, "metadata.ChunkStorageMetadata")
        at = TensorSlice(_sizes(fields.get("offsets")), _sizes(fields.get("sizes")))
        is_inside = len(at.offset) == len(at.shape) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(*at, shape, strict=True)
        )
        if not is_inside or at.offset in slices:  # bounds the slices by the locations, however often one is listed
            raise ValueError(f"{key} of shape {list(shape)} has a slice of {list(at.shape)} at {list(at.offset)}")
        if (key, at.offset) not in locations:
            raise ValueError(f"it does not name a file for a part of {key}")
        slices[at.offset] = SavedSlice(at, *locations[key, at.offset])
    return GlobalTensor(_DTYPES[named.name], shape, tuple(slices.values()))


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Returns the fields of a described object; refuses one of another torch class than `name`."""
    if not isinstance(value, Built) or value.name != _IN_TORCH + name or not isinstance(value.state, dict):
        shown = value.name if isinstance(value, Built) else type(value).__name__
        raise ValueError(f"it has {shown} instead of {name}")
    return value.state


def _sizes(value: Any) -> Sizes:
    if not isinstance(value, Built) or value.name != "torch.Size" or len(value.arguments) != 1:
        raise ValueError("it has another value instead of a shape")
    (sizes,) = value.arguments
    if not isinstance(sizes, tuple) or len(sizes) > _MOST_AXES:
        raise ValueError("it has another value instead of a shape")
    # below 2^63, so that torch's sizes do not overflow
    if math.prod(_whole_number(size) for size in sizes) >= _MOST_ELEMENTS:
        raise ValueError("it has a shape with too many elements")
    return sizes


def _whole_number(value: Any) -> int:
    # `type is int`, because isinstance accepts True
    if type(value) is not int or not 0 <= value < _MOST_ELEMENTS:
        raise ValueError("it has another value instead of a whole number")
    return value
