"""Opens a checkpoint for an export: finds its model, and the names of its tensors in the export."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.errors import ConfigError, DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import CheckpointEntry, checkpoint_at, load_entry, verify_files
from mtrain.checkpoint.store.imported import imported_model
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder
from mtrain.config.schema.model import ModelSection
from mtrain.convert.adapters import main_key, open_adapter
from mtrain.convert.carried import CARRIED_NAME, SCALES_NAME, Carried, Published, carried_in
from mtrain.convert.megatron import MegatronTensors, model_of
from mtrain.convert.merged import MergedTensors
from mtrain.convert.origin import ModelSource, source_of
from mtrain.hf.io.block_scaled import plain_config
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.files import CONFIG_NAME, SINGLE_NAME, has_weights, inside, read_header, read_json, weight_map
from mtrain.hf.schema.registry import ORIGIN, SHARDS_NAME, family_of, fitting_family
from mtrain.hf.schema.table import FilledSlice, Table

_LEFT = ("optimizer.", "rng")
"""Prefixes of keys that are not weights."""
DTYPE_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ExportTarget(NamedTuple):
    """A checkpoint, and its form in the export."""

    path: Path
    entry: CheckpointEntry | None
    """Checkpoint with its digests; None for another program's checkpoint."""
    tensors: CheckpointTensors | MergedTensors | MegatronTensors
    family: Family
    model: ModelSection
    table: Table
    origin: Path | None
    """Folder whose config.json and tokenizer are used: the user's choice, or else the weights' origin."""
    context_tokens: int | None
    tokenizer: Path | None
    """Tokenizer of the run, as in `ModelSource`; None if the user chose a folder."""
    main_weights: bool
    """Whether to prefer float32 main weights if the checkpoint has them."""
    is_import: bool
    """Whether an import returns to its original form."""
    carried: Carried
    """Tensors of the origin that are not part of the model."""
    published: Published | None = None
    """MXFP4 form of the origin, if the export uses it."""

    @property
    def described(self) -> Path | None:
        """Folder with the config.json, the index, and the shards or their names that the export follows."""
        return self.origin if self.published is None else self.published.folder

    def key(self, key: str) -> str:
        """Converts a key in the table to a key in the checkpoint."""
        return main_key(self.tensors.tensors, key) if self.main_weights else key

    def verify(self, num_workers: int) -> None:
        """Compares the files of the weights with their digests."""
        if self.entry is not None:
            files = set(self.entry.manifest.files)
            if not isinstance(self.tensors, MergedTensors):  # its base is verified when it is opened
                saved_tensors = self.tensors.tensors
                files = {saved.file for key in self.table.shapes for saved in saved_tensors[self.key(key)].slices}
            verify_files(self.entry, files, num_workers)
        if self.carried and self.origin is not None and (self.origin / CARRIED_NAME).exists():
            verify_files(load_entry(self.origin.parent), {f"{ORIGIN}/{CARRIED_NAME}"}, num_workers)
        if self.published is not None and self.published.folder != self.origin:
            folder = self.published.folder
            name = f"{ORIGIN}/{folder.name}/{SCALES_NAME}"
            verify_files(load_entry(folder.parent.parent), {name}, num_workers)

    def dtype(self, filled: FilledSlice, requested: torch.dtype | None) -> torch.dtype:
        """Returns a tensor's dtype in the export."""
        stored = self.tensors.tensors[self.key(filled.key)].dtype
        return stored if requested is None or filled.keeps_dtype else requested


def open_target(path: Path, like: Path | None, dtype: torch.dtype | None) -> ExportTarget:
    """Opens a checkpoint and decides on its form in the export.

    Args:
        like: Folder whose config.json and tokenizer are used, or, for another program's checkpoint, a file with the
            section `model`; None uses those that the weights came with.
        dtype: Dtype of the exported tensors; float32 prefers main weights.
    """
    entry: CheckpointEntry | None = None
    is_import = False
    if (folder := megatron_folder(path)) is not None:
        origin = None if like is None or like.is_file() else like
        source = ModelSource(model_of(folder, like), origin, None)
    else:
        if like is not None and like.is_file():
            raise ConfigError(f"{path} already describes its model; leave --model out")
        entry = checkpoint_at(path).entry
        assert entry is not None, "checkpoint_at raises without one"
        folder, source = entry.path, source_of(entry.path)
        is_import = like is None and imported_model(folder) is not None
        if like is not None:
            source = source._replace(origin=like, tokenizer=None)
    family = exported_family(source.model, source.origin)
    files = files_there(source.origin)
    names = [name for file in files.values() for name in file["tensors"]]
    if is_import:
        family = family.as_stored(names)
    elif family.tower is not None or source.model.output.is_tied:
        # besides a tensor outside the base model, transformers 4 does not accept names without `model.`
        family = family.as_stored(names, for_all_versions=True)
    table = family.table(source.model, _shapes(files) if is_import else {})
    tensors: CheckpointTensors | MergedTensors | MegatronTensors
    if entry is None:
        tensors = MegatronTensors(folder, source.model, table)
    elif entry.manifest.base is None:
        tensors = CheckpointTensors(folder)
    else:
        tensors = MergedTensors(open_adapter(folder, dtype), table)
    target = ExportTarget(
        folder,
        entry,
        tensors,
        family,
        source.model,
        table,
        source.origin,
        source.context_tokens,
        source.tokenizer,
        main_weights=entry is not None and dtype == torch.float32,
        is_import=is_import,
        carried=carried_in(source.origin, family),
    )
    if entry is not None:  # MegatronTensors has checked its keys
        _check_keys(target)
    return target


def files_there(origin: Path | None) -> dict[str, Any]:
    """Returns file -> metadata and tensor names (in an import with their shapes) of the weights' original folder; empty
    if unknown. Refuses two files that disagree about the weights."""
    if origin is None:
        return {}
    if (origin / SHARDS_NAME).exists():
        return read_json(origin / SHARDS_NAME)
    if not has_weights(origin):  # with --like, config.json is enough
        return {}
    indexed = weight_map(origin, read_json(origin / CONFIG_NAME))
    if indexed is None:
        header = read_header(inside(origin, SINGLE_NAME))
        return {SINGLE_NAME: {"metadata": header.metadata, "tensors": list(header.tensors)}}
    files: dict[str, Any] = {}
    for name, file in indexed.items():
        files.setdefault(file, {"metadata": {"format": "pt"}, "tensors": []})["tensors"].append(name)
    return files


def _shapes(files: dict[str, Any]) -> dict[str, Sizes]:
    # imports of older versions of mtrain have no shapes
    listed = [file["tensors"] for file in files.values() if isinstance(file["tensors"], dict)]
    return {name: tuple(shape) for tensors in listed for name, shape in tensors.items()}


def exported_family(model: ModelSection, origin: Path | None) -> Family:
    """Returns the family for an export; `origin` is the folder with the config.json that the export's is based on."""
    template = None if origin is None else read_json(origin / CONFIG_NAME)
    family = fitting_family(model) if template is None else family_of(template)
    # refuses the model before any work
    family.config(model, None if template is None else plain_config(template))
    return family.for_depths(model.mtp_depths).for_vision(model.vision is not None)


def _check_keys(target: ExportTarget) -> None:
    saved = {key: facts.shape for key, facts in target.tensors.tensors.items()}
    faults = []
    for key, shape in target.table.shapes.items():
        saved_shape = saved.get(target.key(key))
        is_padded = (
            saved_shape is not None
            and key in PADDED_TABLES
            and saved_shape[0] > shape[0]
            and saved_shape[1:] == shape[1:]
        )
        if saved_shape is None:
            faults.append(f"lacks {target.key(key)}")
        elif saved_shape != shape and not is_padded:
            faults.append(f"{target.key(key)} has shape {list(saved_shape)} instead of {list(shape)}")
    unexpected = sorted(key for key in saved.keys() - target.table.shapes.keys() if not key.startswith(_LEFT))
    faults += [f"has unexpected {key}" for key in unexpected]
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise DataError(
            f"{target.path} does not contain a {target.family.model_type} model: {'; '.join(faults[:8])}{more}"
        )
