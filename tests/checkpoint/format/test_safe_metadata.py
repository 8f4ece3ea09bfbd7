"""Entries of a checkpoint's list of tensors that are accepted."""

import os
import pickle
import subprocess
import sys
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import GlobalTensor, SavedSlice, TensorMetadata, read_metadata
from mtrain.checkpoint.format.writer import write_metadata, write_shards
from mtrain.core.state.shard import Shard
from tests.fault_table import Notice
from tests.messages import refuses


def metadata(file: str = "__0_0.distcp", transforms: list[str] | None = None, **changes: Any) -> Metadata:
    """Lists one tensor in one file."""
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), [chunk])
    place = _StorageInfo(file, 0, 10, transform_descriptors=transforms)
    fields: dict[str, Any] = {
        "state_dict_metadata": {"weight": tensor},
        "storage_data": {MetadataIndex("weight", torch.Size([0, 0])): place},
        "storage_meta": StorageMeta(checkpoint_id=Path("/anywhere"), save_id="1"),
    }
    return Metadata(**{**fields, **changes})


def read(folder: Path, content: Any) -> TensorMetadata:
    """Reads the tensors when `content` (or its pickle) is the list."""
    raw = content if isinstance(content, bytes) else pickle.dumps(content)
    (folder / ".metadata").write_bytes(raw)
    return read_metadata(folder)


def text(content: str) -> bytes:
    """Pickles a text in protocol 2."""
    return b"X" + len(content.encode()).to_bytes(4, "little") + content.encode()


class Calls:
    """Object that calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_list_of_tensors_is_read(tmp_path: Path) -> None:
    saved = SavedSlice(TensorSlice((0, 0), (2, 3)), "__0_0.distcp", 0, 10)
    assert read(tmp_path, metadata()) == ({"weight": GlobalTensor(torch.bfloat16, (2, 3), (saved,))}, set())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_since_2_is_read(tmp_path: Path, protocol: int) -> None:
    others = {"weight": metadata().state_dict_metadata["weight"], "rng": BytesStorageMetadata()}
    extra = metadata(state_dict_metadata=others, planner_data={"a": ("b", 300, -1, 2**40, 0.5, {"set"})})
    assert read(tmp_path, pickle.dumps(extra, protocol)) == (read(tmp_path, metadata()).tensors, {"rng"})


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])  # up to Python 3.12 and from 3.14; 3.13
def test_paths_are_read_whatever_python_wrote_them(tmp_path: Path, module: bytes) -> None:
    raw = pickle.dumps(metadata(), protocol=2)
    assert (here := b"c" + PurePosixPath.__module__.encode() + b"\n") in raw
    assert read(tmp_path, raw.replace(here, b"c" + module + b"\n")).tensors.keys() == {"weight"}


@pytest.mark.fault(
    "checkpoints",
    "pickle in `.metadata` that changes a class to get past the check of names",
    happens="refused; nothing outside of the folder is read and no class changes",
    exit_code=3,
)
def test_no_class_is_changed_and_no_tensor_outside_is_read(tmp_path: Path, notice: Notice) -> None:
    """BUILD with slots sets `PurePosixPath.parts`, by which a name was judged to be plain."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    shard = Shard("weight", (3,), TensorSlice((0,), (3,)), torch.ones(3))
    ((key, written),) = write_shards(outside / "secret", [shard]).tensors
    elsewhere = written.slices[0]._replace(file="../outside/secret")
    write_metadata(inside, [(key, written._replace(slices=(elsewhere,)))])
    named, slots = b"cpathlib\nPurePosixPath\n", b"}" + text("parts") + text("../outside/secret") + b"\x85s"
    listed = pickle.loads((inside / ".metadata").read_bytes())
    raw = b"\x80\x02" + named + b"N" + slots + b"\x86b0" + pickle.dumps(listed, protocol=2)[2:]
    (inside / ".metadata").write_bytes(raw)
    with notice, refuses(DataError, "pathlib.PurePosixPath") as error:
        CheckpointTensors(inside).read("weight", TensorSlice((0,), (3,)))
    assert error.value.exit_code == notice.exit_code
    assert isinstance(PurePosixPath.parts, property)


@pytest.mark.parametrize("slot", ["is_dir", "exists"])
def test_no_method_of_a_class_is_replaced(tmp_path: Path, slot: str) -> None:
    before = getattr(PosixPath, slot)
    raw = b"\x80\x02cpathlib\nPosixPath\nN}" + text(slot) + b"NsN\x86b."
    with refuses(DataError):
        read(tmp_path, raw)
    assert getattr(PosixPath, slot) is before


def bomb(kind: str) -> bytes:
    """Returns a short pickle that costs Python's unpickler gigabytes, its stack or hours."""
    lists = {
        "a huge memo": b"\x80\x02Nr" + b"\xff" * 4 + b".",
        "a deep key": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
        "a deep value": b"\x80\x02)" + b"\x85" * 200_000 + b".",
        "a deep list": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
        "a huge frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "a huge text": b"\x80\x02X" + b"\xff" * 4 + b"a.",
        "a huge long text": b"\x80\x04\x8d" + b"\x7f" * 8 + b"a.",
        "a huge number": b"\x80\x02\x8b" + b"\xff\xff\xff\x7f" + b"1.",
        "a long number in digits": b"\x80\x02I" + b"1" * 100_000 + b"\n.",
    }
    return lists[kind]


BOMBS = ["a huge memo", "a deep key", "a deep value", "a deep list", "a huge frame", "a huge text"]
BOMBS += ["a huge long text", "a huge number", "a long number in digits"]
READ_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from mtrain.checkpoint.format.safe_metadata import read_metadata
from mtrain.base.errors import DataError
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
for folder in sys.argv[1:]:
    try:
        read_metadata(Path(folder))
    except DataError as error:
        print(error.exit_code, str(error).replace(chr(10), " "))
"""


@pytest.mark.fault(
    "checkpoints",
    "bombs in `.metadata`: huge memo, deeply nested keys, huge sizes, a file of 40 GiB",
    happens="refused by one message, in little memory",
    exit_code=3,
)
def test_bombs_are_refused_in_little_memory(tmp_path: Path, notice: Notice) -> None:
    """The test runs in a process of its own, which the pickles would end."""
    folders = [tmp_path / str(number) for number in range(len(BOMBS) + 1)]
    for folder, kind in zip(folders, [*BOMBS, None]):
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"" if kind is None else bomb(kind))
    os.truncate(folders[-1] / ".metadata", 40 * 2**30)
    command = [sys.executable, "-c", READ_IN_LITTLE_MEMORY, *map(str, folders)]
    with notice:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = ended.stdout.splitlines()
    assert (ended.returncode, len(lines)) == (0, len(folders)), ended.stderr
    for line, folder in zip(lines, folders):
        assert line.startswith(f"{notice.exit_code} {folder}/.metadata "), line
        assert len(line) < 500


def test_one_list_of_slices_for_many_tensors_costs_little(tmp_path: Path) -> None:
    """2,000 tensors that share one list of 2,000 slices would be 4 million."""
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))] * 2000
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2, 3]), chunks)
    names = [f"t{number}" for number in range(2000)]
    storage = {MetadataIndex(name, torch.Size([0, 0])): _StorageInfo("f", 0, 10) for name in names}
    with refuses(DataError, "[2, 3]", "[0, 0]"):
        read(tmp_path, metadata(state_dict_metadata=dict.fromkeys(names, tensor), storage_data=storage))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["a folder", "a pipe"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    place = _StorageInfo("__0_0.distcp", 0, 10)
    read(tmp_path, metadata(storage_data={MetadataIndex("weight", torch.Size([0, 0])): place}))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkdir(tmp_path / name) if kind == "a folder" else os.mkfifo(tmp_path / name)
    with refuses(DataError, name):
        CheckpointTensors(tmp_path).read("weight", TensorSlice((0, 0), (2, 3)))


@pytest.mark.parametrize("depth", ["outside", "inside"])
def test_no_function_is_called(tmp_path: Path, depth: str) -> None:
    call = Calls(os.mkdir, str(tmp_path / "ran"))
    with refuses(DataError, "posix.mkdir"):
        read(tmp_path, call if depth == "outside" else metadata(planner_data={"a": [call]}))
    assert not (tmp_path / "ran").exists()


def test_no_method_of_a_permitted_module_is_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    with refuses(DataError):
        read(tmp_path, Calls(FileSystem.rm_file, None, str(victim)))
    assert victim.exists()


@pytest.mark.parametrize(
    "file", ["../other/__0_0.distcp", "/etc/passwd", "inner/__0_0.distcp", "..", ".", "", "a\0b", "x" * 256, 7, None]
)
def test_no_file_elsewhere_is_named(tmp_path: Path, file: Any) -> None:
    with refuses(DataError):
        read(tmp_path, metadata(file))


def test_no_transformation_is_asked_for(tmp_path: Path) -> None:
    with refuses(DataError):
        read(tmp_path, metadata(transforms=["stream.zstd"]))


def listed(offsets: Any = (0, 0), sizes: Any = (2, 3), shape: Any = (2, 3), **changes: Any) -> Metadata:
    """Lists one tensor with contradictory entries."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), [chunk])
    place = _StorageInfo("f", changes.get("start", 0), changes.get("length", 10))
    index = MetadataIndex("weight", torch.Size(changes.get("lies", offsets)))
    return metadata(state_dict_metadata={"weight": tensor}, storage_data={index: place})


BAD_SIZE: Any = "big"
BAD_DTYPE: Any = "int"
BAD_LISTS: dict[str, Any] = {
    "empty": b"",
    "garbage": b"garbage",
    "cut": pickle.dumps(metadata())[:-40],
    "longer than it is": pickle.dumps(metadata()) + b".",
    "a dict": {"a": 1},
    "no tensors": metadata(state_dict_metadata=None),
    "no files": metadata(storage_data=None),
    "other files": metadata(storage_data={1: 2}),
    "other tensors": metadata(state_dict_metadata={"weight": 3}),
    "a number as a name": metadata(state_dict_metadata={3: metadata().state_dict_metadata["weight"]}),
    "an endless name": metadata(state_dict_metadata={"x" * 70_000: metadata().state_dict_metadata["weight"]}),
    "a name with NUL": metadata(state_dict_metadata={"a\0b": metadata().state_dict_metadata["weight"]}),
    "a slice with an axis more": listed(offsets=(0, 0, 0), sizes=(2, 3, 1)),
    "a slice with an axis less": listed(offsets=(0,), sizes=(2,)),
    "a slice that reaches outside": listed(sizes=(2, 4)),
    "a slice that lies nowhere": listed(lies=(1, 0)),
    "a negative size": listed(sizes=(-2, 3)),
    "a negative shape": listed(shape=(2, -3)),
    "a shape beyond memory": listed(shape=(2**40, 2**40)),
    "a negative place": listed(start=-1),
    "a huge place": listed(length=10**30),
    "a shape in words": metadata(
        state_dict_metadata={"weight": TensorStorageMetadata(TensorProperties(torch.bfloat16), BAD_SIZE, [])}
    ),
    "a dtype in words": metadata(
        state_dict_metadata={"weight": TensorStorageMetadata(TensorProperties(BAD_DTYPE), torch.Size([0]), [])}
    ),
}


@pytest.mark.fault(
    "checkpoints",
    "`.metadata` that is cut, garbage or contradicts itself (slices of other axes or outside of the tensor)",
    happens="refused with the reason",
    exit_code=3,
)
@pytest.mark.parametrize("content", BAD_LISTS.values(), ids=BAD_LISTS.keys())
def test_what_is_no_list_is_refused(tmp_path: Path, content: Any, notice: Notice) -> None:
    with notice, refuses(DataError) as error:
        read(tmp_path, content)
    assert error.value.exit_code == notice.exit_code
    assert len(str(error.value)) < 1000


def test_a_missing_list_is_reported(tmp_path: Path) -> None:
    with refuses(DataError):
        read_metadata(tmp_path)
