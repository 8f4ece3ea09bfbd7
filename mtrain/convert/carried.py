"""What an import keeps of a folder besides the model's weights, and an export restores.

Tensors that take no part in a model, those of images, are copied bit for bit into one file next to config.json.

The MXFP4 form in which a model was published lies in a folder next to the config.json of the plain weights: config.json
and index as they were, the names and order of the shards, and the scales, one byte for 32 weights. The blocks follow
from these and the weights.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from mtrain.base.errors import DataError
from mtrain.base.files import write_atomically
from mtrain.checkpoint.format.hashed_file import WriteBehind
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.mxfp4 import BLOCK_SIZE, SCALES_SUFFIX, is_mxfp4
from mtrain.hf.io.safetensors import SafetensorsFile, header_of, raw_bytes
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, INDEX_NAME, has_weights, read_json
from mtrain.hf.schema.registry import SHARDS_NAME
from mtrain.hf.schema.table import Table

CARRIED_NAME = "carried.safetensors"
MXFP4_FOLDER, SCALES_NAME = "mxfp4", "scales.safetensors"

Carried = Mapping[str, SafetensorsFile]
"""Name of a tensor -> file that holds it."""


def carried_in(path: Path | None, family: Family) -> Carried:
    """Finds the copied tensors of a Hugging Face folder, or of `hf/` of an import."""
    if path is None or not family.carried:
        return {}
    kept = path / CARRIED_NAME
    if kept.exists():
        files = [SafetensorsFile(kept)]
    else:
        stored = read_json(path / SHARDS_NAME) if (path / SHARDS_NAME).exists() else {}
        names = [name for shard in stored.values() for name in shard["tensors"]]
        if names and not any(map(family.carries, names)):
            return {}  # `hf/` of an import whose folder had no such tensors
        files = [*HfFolder(path).files.values()]
    return {name: file for file in files for name in file.entries if family.carries(name)}


def write_carried(path: Path, carried: Carried) -> None:
    facts = {name: file.entries[name] for name, file in carried.items()}
    with path.open("wb") as file, WriteBehind(file.fileno()) as behind:
        file.write(header_of({name: (each.dtype, each.shape) for name, each in facts.items()}, {}))
        for name, source in carried.items():
            behind.note(file.write(raw_bytes(source.tensor(name))))


class Published(NamedTuple):
    folder: Path
    """Folder with its config.json, its index, and its shards or their names."""
    scales: Carried
    """Name of scales -> file that holds them."""


def keep_published(origin: Path, folder: HfFolder) -> None:
    """Writes the MXFP4 form of a folder."""
    kept = origin / MXFP4_FOLDER
    kept.mkdir(exist_ok=True)
    for name in (CONFIG_NAME, *([INDEX_NAME] if folder.has_index else [])):
        shutil.copyfile(folder.path / name, kept / name)
    shards = {name: {"metadata": file.metadata, "tensors": list(file.entries)} for name, file in folder.files.items()}
    write_atomically(kept / SHARDS_NAME, json.dumps(shards) + "\n")
    write_carried(kept / SCALES_NAME, _scales(folder))


def published_form(origin: Path | None, table: Table) -> Published:
    """Finds the MXFP4 form that a model was published in; `origin` is the folder whose config.json is used, or what an
    import kept of it."""
    kept = None if origin is None else origin / MXFP4_FOLDER
    if kept is not None and (kept / SCALES_NAME).exists():
        file = SafetensorsFile(kept / SCALES_NAME)
        found = Published(kept, dict.fromkeys(file.entries, file))
    elif origin is not None and has_weights(origin) and is_mxfp4(read_json(origin / CONFIG_NAME)):
        found = Published(origin, _scales(HfFolder(origin)))
    else:
        shown = "the checkpoint" if origin is None else origin
        raise DataError(
            f"--dtype mxfp4 needs the form in which the weights were published, but {shown} does not have it; name the "
            "published folder with --like, or import it again"
        )
    wanted = {tensor.name + SCALES_SUFFIX: tensor.shape for tensor, _ in table.tensors()}
    for name, file in found.scales.items():
        (dtype, shape, *_), weight = file.entries[name], wanted.get(name, ())
        inputs = shape[2] * BLOCK_SIZE if len(shape) == 3 else 0
        if dtype != torch.uint8 or (*shape[:1], inputs, *shape[1:2]) != weight:
            raise DataError(
                f"{file.path}: {name} of shape {list(shape)} and {dtype} holds no scales of a weight of shape "
                f"{list(weight)}; name the published folder of this model with --like"
            )
    return found


def _scales(folder: HfFolder) -> Carried:
    return {name: file for file in folder.files.values() for name in file.entries if name.endswith(SCALES_SUFFIX)}
