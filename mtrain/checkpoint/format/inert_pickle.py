"""Reads a pickle as plain data: nothing that it names is imported, called, built or changed.

Python's unpickler makes real objects, and even if few classes are let through a pickle can set their attributes for the
whole process (opcode BUILD), or end the process by a huge memo number or a key nested too deeply. Here an object is a
`Built`, the class's name with the pickled description, which does nothing; the caller checks the values. Only the
opcodes that lists of tensors need are known. Work and memory are proportional to the length of the pickle, and nothing
recurses.

Opcodes: `pickletools` of Python's standard library describes each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, NoReturn

_SAME_MODULES = {"pathlib._local": "pathlib", "__builtin__": "builtins"}
"""Module names of Python 3.13 and of protocol 2 -> names under which other versions have the same classes."""
_LONGEST_SHOWN = 100
"""Number of characters of a name that a message shows at most."""


class PickleError(ValueError):
    """The pickle is damaged or asks for something that is refused."""


class Named:
    """Class or function that a pickle names, as `module.name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Built:
    """Object that a pickle describes; compared and hashed by identity, so as a key it costs nothing."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None
        """Fields of the object, once BUILD has set them."""


class Saved:
    """Placeholder for the bytes of a tensor in a torch.save record (a persistent id)."""

    __slots__ = ("id",)

    def __init__(self, id_: Any) -> None:
        self.id = id_


def read_inert(raw: bytes, allowed: Collection[str]) -> Any:
    """Reads a pickle as plain data; bytes after its end are an error.

    Returns:
        None, bool, int, float, str, bytes, tuple, list, dict (of text, whole numbers and `Built` as keys), `Built`,
            `Named` or `Saved`. A set is the list of its elements.

    Raises:
        PickleError: The pickle is damaged, or asks for a name or an opcode that is not allowed.
    """
    return _Machine(raw, allowed).run()


class _Machine:
    """Interpreter of one pickle: its stack, marks and memo."""

    def __init__(self, raw: bytes, allowed: Collection[str]) -> None:
        self._raw, self._at, self._allowed = raw, 0, allowed
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Height of the stack at each open mark."""
        self._memo: dict[int, Any] = {}  # a dict, so that a huge number costs no more than a small one
        self._names: dict[str, Named] = {}

    def run(self) -> Any:
        steps = _STEPS
        try:
            while (code := self._raw[self._at]) != _STOP:
                self._at += 1
                steps[code](self)
        except IndexError:  # from the stack, the marks or the bytes: the pickle takes something that is not there
            self._refuse("is cut or takes more from its stack than is there")
        except KeyError as fault:
            self._refuse(f"refers to {str(fault)[:_LONGEST_SHOWN]}, which it has not stored")
        except (UnicodeDecodeError, struct.error) as fault:
            self._refuse(f"holds no text or number where one is due ({fault})")
        if self._at + 1 != len(self._raw):
            self._refuse("goes on after its end")
        if len(self._stack) != 1 or self._marks:
            self._refuse("leaves something on its stack")
        return self._stack[0]

    def _refuse(self, reason: str) -> NoReturn:
        raise PickleError(f"its pickle {reason}, at byte {self._at}")

    def _take(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._raw):
            self._refuse("is cut")
        return self._raw[begin : self._at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _pop(self) -> Any:
        # an opcode may not reach below an open mark, as in the C unpickler
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise IndexError
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _top(self, kind: type[Any]) -> Any:
        top = self._pop()
        if type(top) is not kind:
            changed = top.name if type(top) is Named else f"a value of type {type(top).__name__}"
            self._refuse(f"changes {changed}, where an object, list or dict of its own is expected")
        self._stack.append(top)
        return top

    def refuse_opcode(self) -> None:
        """Refuses an opcode that lists of tensors do not need."""
        self._refuse(f"holds the opcode {self._raw[self._at - 1]:#04x}, which is refused")

    def skip(self, size: int) -> None:
        """Skips bytes that change nothing here."""
        self._take(size)

    # values

    def push(self, value: Any) -> None:
        """Pushes a value."""
        self._stack.append(value)

    def push_number(self, size: int) -> None:
        """Pushes an unsigned number of `size` bytes."""
        self._stack.append(self._number(size))

    def push_signed(self) -> None:
        """Pushes a signed number of four bytes."""
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def push_long(self) -> None:
        """Pushes a signed number of at most 255 bytes."""
        self._stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def push_float(self) -> None:
        """Pushes a float of eight bytes, big-endian."""
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def push_text(self, size: int) -> None:
        """Pushes a UTF-8 text; its length, a number of `size` bytes, comes first."""
        self._stack.append(self._take(self._number(size)).decode())

    def push_bytes(self, size: int) -> None:
        """Pushes bytes; their length, a number of `size` bytes, comes first."""
        self._stack.append(self._take(self._number(size)))

    # collections

    def mark(self) -> None:
        """Opens a mark."""
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        """Drops the topmost value."""
        self._pop()

    def tuple_of(self, count: int) -> None:
        """Joins the topmost values in a tuple."""
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def tuple_to_mark(self) -> None:
        """Joins all values since the mark in a tuple."""
        self._stack.append(tuple(self._pop_to_mark()))

    def append(self) -> None:
        """Appends the topmost value to the list below it."""
        value = self._pop()
        self._top(list).append(value)

    def extend(self) -> None:
        """Appends all values since the mark to a list."""
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def set_item(self) -> None:
        """Sets one item of a dict."""
        value, key = self._pop(), self._pop()
        self._put(self._top(dict), [key, value])

    def set_items(self) -> None:
        """Sets all pairs since the mark in a dict."""
        pairs = self._pop_to_mark()
        self._put(self._top(dict), pairs)

    def _put(self, target: dict[Any, Any], pairs: list[Any]) -> None:
        if len(pairs) % 2:
            self._refuse("holds a key without a value")
        for number in range(0, len(pairs), 2):
            if type(pairs[number]) not in (str, int, Built):  # hashing a deeply nested tuple ends the process
                self._refuse(f"has a key of type {type(pairs[number]).__name__}")
            target[pairs[number]] = pairs[number + 1]

    # memo

    def memoize(self) -> None:
        """Stores the topmost value under the next number."""
        # numbered by the memo's size, as in Python's own unpickler
        self._memo[len(self._memo)] = self._stack[-1]

    def put_memo(self, size: int) -> None:
        """Stores the topmost value under the number that follows."""
        self._memo[self._number(size)] = self._stack[-1]

    def get_memo(self, size: int) -> None:
        """Pushes a stored value."""
        self._stack.append(self._memo[self._number(size)])

    # names and objects

    def name_in_text(self) -> None:
        """Pushes a name that is given as two lines: module and name."""
        ends = [self._raw.find(b"\n", self._at)]
        ends.append(self._raw.find(b"\n", ends[0] + 1) if ends[0] >= 0 else -1)
        if ends[1] < 0:
            self._refuse("is cut")
        module, name = self._raw[self._at : ends[0]].decode(), self._raw[ends[0] + 1 : ends[1]].decode()
        self._at = ends[1] + 1
        self._push_name(module, name)

    def name_on_stack(self) -> None:
        """Pushes a name whose module and name are on the stack."""
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            self._refuse("names something by what is no text")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        full = f"{_SAME_MODULES.get(module, module)}.{name}"
        if full not in self._allowed:
            shown = full[:_LONGEST_SHOWN].encode("unicode_escape").decode()
            raise PickleError(f"it asks for {shown}, which is refused")
        # one object per name: a name that occurs a million times costs as much as one
        self._stack.append(self._names.setdefault(full, Named(full)))

    def call(self) -> None:
        """Pushes what stands for the result of calling a function or class with a tuple of arguments."""
        arguments, function = self._pop(), self._pop()
        if type(function) is not Named or type(arguments) is not tuple:
            self._refuse("calls what is no name, or with what are no arguments")
        if function.name == "collections.OrderedDict" and not arguments:
            self._stack.append({})  # filled by the opcodes that follow
        elif function.name == "builtins.set" and len(arguments) == 1 and type(arguments[0]) is list:
            self._stack.append(arguments[0])
        else:
            self._stack.append(Built(function.name, arguments))

    def give_state(self) -> None:
        """Gives an object its fields, once."""
        state = self._pop()
        target = self._top(Built)
        if target.state is not None:
            self._refuse(f"describes a {target.name} twice")
        target.state = state

    def stand_in(self) -> None:
        """Pushes a placeholder for data that lies outside of the pickle."""
        self._stack.append(Saved(self._pop()))


_STOP = ord(".")
_Step = Callable[[_Machine], None]


def _pushing(value: Any) -> _Step:
    return lambda machine: machine.push(value)


_KNOWN: dict[bytes, _Step] = {
    b"\x80": lambda machine: machine.skip(1),  # PROTO: all opcodes of protocol 2 and up are read alike
    b"\x95": lambda machine: machine.skip(8),  # FRAME: useful only when reading from a pipe
    b"N": _pushing(None),
    b"\x88": _pushing(True),
    b"\x89": _pushing(False),
    b")": _pushing(()),
    b"]": lambda machine: machine.push([]),
    b"\x8f": lambda machine: machine.push([]),  # EMPTY_SET
    b"}": lambda machine: machine.push({}),
    b"K": lambda machine: machine.push_number(1),
    b"M": lambda machine: machine.push_number(2),
    b"J": _Machine.push_signed,
    b"\x8a": _Machine.push_long,
    b"G": _Machine.push_float,
    b"\x8c": lambda machine: machine.push_text(1),
    b"X": lambda machine: machine.push_text(4),
    b"C": lambda machine: machine.push_bytes(1),
    b"B": lambda machine: machine.push_bytes(4),
    b"(": _Machine.mark,
    b"0": _Machine.pop,
    b"\x85": lambda machine: machine.tuple_of(1),
    b"\x86": lambda machine: machine.tuple_of(2),
    b"\x87": lambda machine: machine.tuple_of(3),
    b"t": _Machine.tuple_to_mark,
    b"a": _Machine.append,
    b"e": _Machine.extend,
    b"\x90": _Machine.extend,  # ADDITEMS, to a set
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"\x94": _Machine.memoize,
    b"q": lambda machine: machine.put_memo(1),
    b"r": lambda machine: machine.put_memo(4),
    b"h": lambda machine: machine.get_memo(1),
    b"j": lambda machine: machine.get_memo(4),
    b"c": _Machine.name_in_text,
    b"\x93": _Machine.name_on_stack,
    b"R": _Machine.call,
    b"\x81": _Machine.call,  # NEWOBJ: an object of a class, before its fields
    b"b": _Machine.give_state,
    b"Q": _Machine.stand_in,
}
_STEPS: tuple[_Step, ...] = tuple(_KNOWN.get(bytes([code]), _Machine.refuse_opcode) for code in range(256))
