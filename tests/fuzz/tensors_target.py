"""The list of tensors of a checkpoint without a manifest, such as Megatron-LM's, and the records that it names."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path, PosixPath, PurePosixPath
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.writer import write_metadata, write_shards
from mtrain.core.state.shard import Shard
from tests.fuzz.mutations import HUGE, TEXTS, mutated_bytes
from tests.fuzz.target import Target

_LIST, _SHARD, _INSIDE, _OUTSIDE = ".metadata", "__0_0.distcp", "inside", "outside"
_OTHER_NUMBERS = "other_numbers"
"""File that marks a changed shard: without checksums its numbers may differ."""
_SECRET = -7.0
_CLASSES: tuple[type[Any], ...] = (PosixPath, PurePosixPath, torch.Size, Metadata, MetadataIndex, _StorageInfo)


def _facts_of_classes() -> list[dict[str, Any]]:
    """Returns all attributes except the one in which `pickle.dumps` keeps its lookups."""
    return [{name: value for name, value in vars(one).items() if name != "__slotnames__"} for one in _CLASSES]


_BEFORE = _facts_of_classes()
_SNIPPETS = (
    b"cpathlib\nPurePosixPath\nN}X\x05\0\0\0parts)s\x86b0",  # changes a class
    b"cposix\nsystem\nX\x04\0\0\0true\x85R",
    b"cbuiltins\ngetattr\n",
    b"Nr\xff\xff\xff\xff",
    b"j\xff\xff\xff\x7f",
    b")" + b"\x85" * 50_000,
    b"}" + b")" + b"\x85" * 50_000 + b"Ns",
    b"]" * 50_000 + b"a" * 49_999,
    b"\x95" + b"\xff" * 8,
    b"X\xff\xff\xff\xff",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"(((((ttttt",
    b"0",
    b"b",
    b"R",
    b"\x81",
    b"2" * 1000,
)


@cache
def _values() -> dict[str, torch.Tensor]:
    """Returns numbers that identify the place of each."""
    return {
        "embedding.weight": torch.arange(1.0, 25.0).view(6, 4),
        "decoder.layers.mlp.weight": torch.arange(101.0, 125.0).view(2, 3, 4),
        "final_norm.weight": torch.arange(201.0, 205.0),
    }


def _write(folder: Path, random: Random) -> None:
    inside, outside = folder / _INSIDE, folder / _OUTSIDE
    inside.mkdir()
    outside.mkdir()
    parts = []
    for key, values in _values().items():
        for start in range(0, len(values), 2):
            box = values[start : start + 2].contiguous()
            offset = (start, *[0] * (values.dim() - 1))
            parts.append(Shard(key, tuple(values.shape), TensorSlice(offset, tuple(box.shape)), box))
    write_metadata(inside, write_shards(inside / _SHARD, parts).tensors)
    write_shards(outside / _SHARD, [part._replace(data=torch.full_like(part.data, _SECRET)) for part in parts])
    listed = pickle.loads((inside / _LIST).read_bytes())
    match random.choice(("bytes", "bytes", "opcodes", "object", "object", "shard", "whole")):
        case "bytes":
            (inside / _LIST).write_bytes(mutated_bytes(_pickled(listed, random), random))
        case "opcodes":
            raw = _pickled(listed, random)
            at = random.choice((2, 2, random.randrange(2, len(raw))))
            (inside / _LIST).write_bytes(raw[:at] + random.choice(_SNIPPETS) + raw[at:])
        case "object":
            (inside / _LIST).write_bytes(_pickled(_contradicting(listed, random), random))
        case "shard":
            (inside / _SHARD).write_bytes(mutated_bytes((inside / _SHARD).read_bytes(), random))
            (folder / _OTHER_NUMBERS).touch()
        case "whole":
            pass


def _pickled(listed: Metadata, random: Random) -> bytes:
    return pickle.dumps(listed, protocol=random.choice((2, 4, 5)))


def _contradicting(listed: Metadata, random: Random) -> Metadata:
    """Changes one value of the list."""
    tensors: dict[Any, Any] = dict(listed.state_dict_metadata)
    places: dict[Any, Any] = dict(listed.storage_data)
    key = random.choice(sorted(tensors))
    index = random.choice(sorted(places, key=str))
    number = random.choice((*HUGE, 0, 1, 2, 3, -1))
    match random.choice(("shape", "box", "place", "file", "name", "kind", "index", "field")):
        case "shape":
            tensors[key] = TensorStorageMetadata(TensorProperties(torch.float32), _size(number, random), [])
        case "box":
            chunk = ChunkStorageMetadata(_size(number, random), _size(number, random))
            tensors[key] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([6, 4]), [chunk])
        case "place":
            places[index] = _StorageInfo(_SHARD, number, random.choice((number, 10)))
        case "file":
            names: tuple[Any, ...] = (
                *TEXTS,
                f"../{_OUTSIDE}/{_SHARD}",
                f"{_SHARD}\0",
                PurePosixPath("..", _OUTSIDE, _SHARD),
                7,
                None,
            )
            old = places[index]
            places[index] = _StorageInfo(random.choice(names), old.offset, old.length)
        case "name":
            tensors[random.choice((*TEXTS, 3, None))] = tensors.pop(key)
        case "kind":
            tensors[key] = random.choice((BytesStorageMetadata(), None, 3, [], places[index]))
        case "index":
            places[MetadataIndex(key, _size(number, random))] = places.pop(index)
        case "field":
            of_tensors: tuple[Any, ...] = (tensors, None, [], 3)
            of_places: tuple[Any, ...] = (places, None, [], {1: 2})
            return Metadata(state_dict_metadata=random.choice(of_tensors), storage_data=random.choice(of_places))
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _size(number: int, random: Random) -> Any:
    sizes = random.choice(((number,), (number, 4), (6, number), (0, 0), (0, 0, 0), (), (1,) * 100))
    return torch.Size(sizes) if all(abs(size) < 2**63 for size in sizes) else sizes


def _read(folder: Path) -> None:
    """Checks that numbers come only from this checkpoint, in the listed shape, and that no class has changed."""
    try:
        tensors = CheckpointTensors(folder / _INSIDE)
        known = {number for values in _values().values() for number in values.flatten().tolist()}
        for key, facts in tensors.tensors.items():
            values = tensors.read(key, TensorSlice.whole(facts.shape))
            assert tuple(values.shape) == facts.shape
            assert values.dtype == facts.dtype
            assert _SECRET not in values
            if not (folder / _OTHER_NUMBERS).exists():
                assert set(values.flatten().tolist()) <= known, key
    finally:
        assert _facts_of_classes() == _BEFORE


TARGET = Target(_write, _read, frozenset({3}))
