"""Tensors that take no part in a model and that conversions copy bit for bit: those of images.

An import keeps them in one file next to config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mtrain.checkpoint.format.hashed_file import WriteBehind
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.safetensors import SafetensorsFile, header_of, raw_bytes
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import read_json
from mtrain.hf.schema.registry import SHARDS_NAME

CARRIED_NAME = "carried.safetensors"

Carried = Mapping[str, SafetensorsFile]
"""Name of a tensor -> file that holds it."""


def carried_in(path: Path | None, family: Family) -> Carried:
    """Finds the copied tensors of a Hugging Face folder, or of `hf/` of an import."""
    if path is None or not family.carried:
        return {}
    kept = path / CARRIED_NAME
    if not kept.exists() and _had_none(path, family):
        return {}
    files = [SafetensorsFile(kept)] if kept.exists() else HfFolder(path).files.values()
    return {name: file for file in files for name in file.entries if family.carries(name)}


def _had_none(path: Path, family: Family) -> bool:
    """Says whether this is `hf/` of an import whose folder had no such tensors."""
    stored = read_json(path / SHARDS_NAME) if (path / SHARDS_NAME).exists() else {}
    names = [name for shard in stored.values() for name in shard["tensors"]]
    return bool(names) and not any(map(family.carries, names))


def write_carried(path: Path, carried: Carried) -> None:
    facts = {name: file.entries[name] for name, file in carried.items()}
    with path.open("wb") as file, WriteBehind(file.fileno()) as behind:
        file.write(header_of({name: (each.dtype, each.shape) for name, each in facts.items()}, {}))
        for name, source in carried.items():
            behind.note(file.write(raw_bytes(source.tensor(name))))
