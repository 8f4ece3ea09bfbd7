"""A checkpoint -> a folder that Hugging Face's libraries load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mtrain
from mtrain.checkpoint.directory import CheckpointEntry, checkpoint_at
from mtrain.checkpoint.tensors import CheckpointTensors
from mtrain.config.load import load_config
from mtrain.config.model import ModelSection
from mtrain.convert.importing import ORIGIN, SHARDS_NAME
from mtrain.convert.proof import Proof, prove
from mtrain.convert.work import Unit, run_units, working_folder
from mtrain.errors import DataError
from mtrain.files import disk_faults, write_atomically
from mtrain.hf.axes import Sizes
from mtrain.hf.family import Family
from mtrain.hf.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, HfFolder, check_names, read_json, side_files
from mtrain.hf.registry import family_of, fitting_family
from mtrain.hf.safetensors import header_of, raw_bytes
from mtrain.hf.table import HfTensor, Table, write_tensor

_CAST_ELEMENTS = 1 << 24
"""Cast at once."""
_MAIN = "optimizer.state.param."
_LEFT = ("optimizer.", "rng")
"""Beginnings of keys that a run's checkpoint has beside the weights."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors whose rows may be padded."""
DTYPE_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Target(NamedTuple):
    """A checkpoint and what it will be called outside."""

    entry: CheckpointEntry
    tensors: CheckpointTensors
    family: Family
    model: ModelSection
    table: Table
    origin: Path | None
    """Folder with config.json, tokenizer and shard names of the weights that training started from."""
    main_weights: bool
    """Whether float32 main weights are there and wanted."""

    def key(self, key: str) -> str:
        """Key in the table -> key in the checkpoint."""
        return _MAIN + key if self.main_weights else key

    def dtype(self, key: str, wanted: torch.dtype | None) -> torch.dtype:
        """What a tensor will have outside."""
        return self.tensors.tensors[self.key(key)].dtype if wanted is None else wanted


def open_target(path: Path, like: Path | None, dtype: torch.dtype | None) -> Target:
    """Opens a checkpoint and finds out how it is to be called.

    Args:
        path: A checkpoint, or a run folder.
        like: Folder whose config.json and tokenizer are taken; None: those that the weights came with.
        dtype: Wanted outside; float32 takes main weights where the checkpoint has them.

    Raises:
        DataError: It is no checkpoint, no family describes its model, or tensors are missing or have other shapes.
    """
    entry = checkpoint_at(path).entry
    assert entry is not None, "checkpoint_at raises where there is none"
    model, origin = model_and_origin(entry.path)
    origin = like if like is not None else origin
    template = None if origin is None else read_json(origin / CONFIG_NAME)
    family = fitting_family(model) if template is None else family_of(template)
    tensors = CheckpointTensors(entry.path)
    table = family.table(model)
    main = dtype == torch.float32 and _MAIN + next(iter(table.shapes)) in tensors.tensors
    target = Target(entry, tensors, family, model, table, origin, main)
    _check_keys(target)
    return target


def model_and_origin(checkpoint: Path) -> tuple[ModelSection, Path | None]:
    """The model that a checkpoint holds, and the folder with what its first weights came with.

    Raises:
        DataError: Nothing says what model it is.
    """
    if (checkpoint / ORIGIN / CONFIG_NAME).exists():
        config = read_json(checkpoint / ORIGIN / CONFIG_NAME)
        return family_of(config).model(config), checkpoint / ORIGIN
    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.exists():
        raise DataError(f"{path} is not there, which says what model {checkpoint} holds; name a checkpoint in its run")
    run = load_config([path], [])
    start = run.checkpoint.initialize_from
    if start is None or not Path(start).exists():
        return run.model, None
    entry = checkpoint_at(Path(start)).entry
    assert entry is not None
    return run.model, model_and_origin(entry.path)[1]


def export_hf(path: Path, out: Path, like: Path | None, dtype: torch.dtype | None, num_workers: int) -> Proof:
    """Converts a checkpoint and proves it.

    Args:
        path: A checkpoint, or a run folder.
        out: The folder; must not exist.
        like: As `open_target`.
        dtype: Of the tensors outside; None keeps what the checkpoint computes with.
        num_workers: Threads that each write one file.

    Raises:
        ConfigError: `out` exists.
        DataError: As `open_target`.
        MachineError: The disk refuses.
    """
    target = open_target(path, like, dtype)
    files = shards(target, dtype)
    with working_folder(out, _plan(target, files, dtype)) as folder:

        def write(unit: Unit, partial: Path, tell: Callable[[int], None]) -> None:
            shard = files[unit.name]
            described = {tensor.name: (target.dtype(key, dtype), tensor.shape) for tensor, key in shard.tensors}
            with partial.open("wb") as file:
                file.write(header_of(described, shard.metadata))
                for tensor, key in shard.tensors:
                    values = write_tensor(tensor, target.key(key), target.tensors.read)
                    for part in torch.split(values.view(-1), _CAST_ELEMENTS):
                        file.write(raw_bytes(part.to(described[tensor.name][0])))
                    tell(values.nbytes)

        units = [Unit(name, _bytes(shard, target, dtype)) for name, shard in files.items()]
        run_units(folder, units, write, num_workers, "exporting")
        with disk_faults(f"write {folder}"):
            _write_side_files(folder, target, files, dtype)
        written = HfFolder(folder)
        check_names(written, {tensor.name: tensor.shape for tensor, _ in target.table.tensors()}, ())
        proof = prove(target.table, target.tensors, target.key, written.tensor, num_workers)
    return proof


class Shard(NamedTuple):
    """One safetensors file to be written."""

    tensors: list[tuple[HfTensor, str]]
    """With the checkpoint key of each, in the order of the bytes."""
    metadata: dict[str, str]


def shards(target: Target, dtype: torch.dtype | None, max_bytes: int = 5_000_000_000) -> dict[str, Shard]:
    """Files as they were where the weights came from, else full ones one after the other."""
    place = {tensor.name: (tensor, piece.key) for tensor, piece in target.table.tensors()}
    if target.origin is not None and (target.origin / SHARDS_NAME).exists():
        said = read_json(target.origin / SHARDS_NAME)
        named = {
            file: Shard([place[name] for name in facts["tensors"] if name in place], facts["metadata"])
            for file, facts in said.items()
        }
        named = {file: shard for file, shard in named.items() if shard.tensors}
        if sum(len(shard.tensors) for shard in named.values()) == len(place):
            return named
    groups: list[list[tuple[HfTensor, str]]] = [[]]
    filled = 0
    for tensor, key in place.values():
        size_bytes = torch.Size(tensor.shape).numel() * target.dtype(key, dtype).itemsize
        if groups[-1] and filled + size_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, key))
        filled += size_bytes
    if len(groups) == 1:
        return {SINGLE_NAME: Shard(groups[0], {"format": "pt"})}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": Shard(group, {"format": "pt"})
        for number, group in enumerate(groups, start=1)
    }


def _check_keys(target: Target) -> None:
    saved = {key: facts.shape for key, facts in target.tensors.tensors.items()}
    faults = []
    for key, wanted in target.table.shapes.items():
        found = saved.get(target.key(key))
        if found is None:
            faults.append(f"lacks {target.key(key)}")
        elif found != wanted and not _is_padded(key, found, wanted):
            faults.append(f"{target.key(key)} has shape {list(found)} instead of {list(wanted)}")
    unexpected = sorted(key for key in saved.keys() - target.table.shapes.keys() if not key.startswith(_LEFT))
    faults += [f"holds unexpected {key}" for key in unexpected]
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise DataError(
            f"{target.entry.path} does not hold a {target.family.model_type} model: {'; '.join(faults[:8])}{more}"
        )


def _is_padded(key: str, found: Sizes, wanted: Sizes) -> bool:
    return key in _VOCABULARY and found[0] > wanted[0] and found[1:] == wanted[1:]


def _plan(target: Target, files: Mapping[str, Shard], dtype: torch.dtype | None) -> dict[str, Any]:
    """What makes a later call the same one."""
    return {
        "program": mtrain.__version__,
        "source": str(target.entry.path.resolve()),
        "manifest": target.entry.manifest.model_dump(mode="json"),
        "files": {name: [tensor.name for tensor, _ in shard.tensors] for name, shard in files.items()},
        "dtype": str(dtype),
        "main_weights": target.main_weights,
    }


def _bytes(shard: Shard, target: Target, dtype: torch.dtype | None) -> int:
    return sum(torch.Size(tensor.shape).numel() * target.dtype(key, dtype).itemsize for tensor, key in shard.tensors)


def _write_side_files(folder: Path, target: Target, files: Mapping[str, Shard], dtype: torch.dtype | None) -> None:
    origin, template = target.origin, None
    if origin is not None:
        template = read_json(origin / CONFIG_NAME)
        for name in side_files(origin):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(origin / name, folder / name)
    config = target.family.config(target.model, template)
    main = target.dtype("embedding.word_embeddings.weight", dtype)
    named = str(main).removeprefix("torch.")
    field = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    if template is None or config.get(field) != named:
        config[field] = named
    _write_like(folder / CONFIG_NAME, config, None if origin is None else origin / CONFIG_NAME)
    if list(files) != [SINGLE_NAME]:
        index = {
            "metadata": _index_metadata(target, files, dtype),
            "weight_map": dict(
                sorted((tensor.name, name) for name, shard in files.items() for tensor, _ in shard.tensors)
            ),
        }
        _write_like(folder / INDEX_NAME, index, None if origin is None else origin / INDEX_NAME)


def _index_metadata(target: Target, files: Mapping[str, Shard], dtype: torch.dtype | None) -> dict[str, Any]:
    size = {"total_size": sum(_bytes(shard, target, dtype) for shard in files.values())}
    if target.origin is None or not (target.origin / INDEX_NAME).exists():
        return size
    return {**read_json(target.origin / INDEX_NAME).get("metadata", {}), **size}


def _write_like(path: Path, content: dict[str, Any], source: Path | None) -> None:
    """Writes JSON; where the source says the same, as its very bytes."""
    if source is not None and source.exists() and read_json(source) == content:
        shutil.copyfile(source, path)
    else:
        write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
