"""What an import keeps of a folder besides the model's weights, and an export restores.

Tensors that are not part of the text model, such as an image encoder's, are copied bit for bit into one file next to
config.json.

For a model published in MXFP4, a folder next to the plain weights' config.json has the original config.json and index,
the names and order of the shards, and the scales, one byte per 32 weights. These and the weights determine the blocks.
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
"""Name of a tensor -> file that contains it."""


def carried_in(path: Path | None, family: Family) -> Carried:
    """Finds the tensors to copy in a Hugging Face folder, or in an import's `hf/`."""
    if path is None or not family.carried:
        return {}
    file_of_import = path / CARRIED_NAME
    if file_of_import.exists():
        files = [SafetensorsFile(file_of_import)]
    else:
        stored = read_json(path / SHARDS_NAME) if (path / SHARDS_NAME).exists() else {}
        names = [name for shard in stored.values() for name in shard["tensors"]]
        if names and not any(map(family.carries, names)):
            return {}  # an import's `hf/` whose original folder had no such tensors
        files = [*HfFolder(path).files.values()]
    return {name: file for file in files for name in file.entries if family.carries(name)}


def write_carried(path: Path, carried: Carried) -> None:
    facts = {name: file.entries[name] for name, file in carried.items()}
    with path.open("wb") as file, WriteBehind(file.fileno()) as behind:
        file.write(header_of({name: (entry.dtype, entry.shape) for name, entry in facts.items()}, {}))
        for name, source in carried.items():
            behind.note(file.write(raw_bytes(source.tensor(name))))


class Published(NamedTuple):
    folder: Path
    """Folder with the config.json, index, and shards or their names."""
    scales: Carried
    """Name of scales -> file that contains them."""


def keep_published(origin: Path, folder: HfFolder) -> None:
    """Writes what an export needs to restore a folder's MXFP4 form."""
    target = origin / MXFP4_FOLDER
    target.mkdir(exist_ok=True)
    for name in (CONFIG_NAME, *([INDEX_NAME] if folder.has_index else [])):
        shutil.copyfile(folder.path / name, target / name)
    shards = {name: {"metadata": file.metadata, "tensors": list(file.entries)} for name, file in folder.files.items()}
    write_atomically(target / SHARDS_NAME, json.dumps(shards) + "\n")
    write_carried(target / SCALES_NAME, _scales(folder))


def published_form(origin: Path | None, table: Table) -> Published:
    """Finds the MXFP4 form in which a model was published; `origin` is the folder whose config.json is used, or an
    import's copy of it."""
    kept_folder = None if origin is None else origin / MXFP4_FOLDER
    if kept_folder is not None and (kept_folder / SCALES_NAME).exists():
        file = SafetensorsFile(kept_folder / SCALES_NAME)
        published = Published(kept_folder, dict.fromkeys(file.entries, file))
    elif origin is not None and has_weights(origin) and is_mxfp4(read_json(origin / CONFIG_NAME)):
        published = Published(origin, _scales(HfFolder(origin)))
    else:
        shown = "the checkpoint" if origin is None else origin
        raise DataError(
            f"--dtype mxfp4 needs the weights as they were published, but {shown} does not have them; name the "
            "published folder with --like, or import it again"
        )
    weight_shapes = {tensor.name + SCALES_SUFFIX: tensor.shape for tensor, _ in table.tensors()}
    for name, file in published.scales.items():
        (dtype, shape, *_), weight = file.entries[name], weight_shapes.get(name, ())
        inputs = shape[2] * BLOCK_SIZE if len(shape) == 3 else 0
        if dtype != torch.uint8 or (*shape[:1], inputs, *shape[1:2]) != weight:
            raise DataError(
                f"{file.path}: {name} of shape {list(shape)} and {dtype} does not have the scales of a weight of shape "
                f"{list(weight)}; name the published folder of this model with --like"
            )
    return published


def _scales(folder: HfFolder) -> Carried:
    return {name: file for file in folder.files.values() for name in file.entries if name.endswith(SCALES_SUFFIX)}
