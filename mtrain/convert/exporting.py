"""Exports a checkpoint as a Hugging Face folder."""

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mtrain.base.files import disk_faults
from mtrain.base.tensor_slice import Sizes
from mtrain.base.version import __version__
from mtrain.checkpoint.format.hashed_file import WriteBehind
from mtrain.checkpoint.store.directory import reading
from mtrain.convert.carried import published_form
from mtrain.convert.endings import put_ending, write_json
from mtrain.convert.origin import put_side_files
from mtrain.convert.proof import Proof, Sides, prove, whole
from mtrain.convert.target import ExportTarget, files_there, open_target
from mtrain.convert.work import Tell, Unit, run_units, working_folder
from mtrain.hf.io.block_scaled import plain_config
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.io.mxfp4 import BLOCK_BYTES, BLOCKS_SUFFIX, FORMAT, SCALES_SUFFIX, Mxfp4, packed
from mtrain.hf.io.safetensors import SafetensorsFile, header_of, raw_bytes
from mtrain.hf.io.source import EMBEDDINGS, check_names
from mtrain.hf.schema.files import CONFIG_NAME, EOS_KEY, INDEX_NAME, NAMED_WEIGHTS, SINGLE_NAME, as_declared, read_json
from mtrain.hf.schema.table import HfTensor, stream_tensor
from mtrain.hf.schema.tower import TEXT
from mtrain.hf.tokenizer.tokenizer import added_by

_log = logging.getLogger(__name__)

_SHARD_BYTES = 5_000_000_000
_DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Names of one field of config.json, in transformers 5 and in older versions."""


def export_hf(
    path: Path,
    out: Path,
    like: Path | None,
    dtype: torch.dtype | Literal["mxfp4"] | None,
    num_workers: int,
    check: Callable[[], None] = lambda: None,
) -> Proof:
    """Converts a checkpoint and proves the result.

    Args:
        path: Folder of a checkpoint, of a run, or of Megatron-LM's or Megatron-Bridge's checkpoints.
        like: Folder or file that describes the model, as in `open_target`.
        dtype: Dtype of the exported tensors. None keeps the dtype of the model's weights. "mxfp4" also keeps it, except
            for weights that were published in MXFP4, which are rounded to it and counted in the proof.
        num_workers: Number of threads, each writing one file at a time; 1 uses the caller's thread.
        check: Called between two pieces of work, in any thread. An error that it raises ends the export; the next call
            keeps the complete files.

    Raises:
        ConfigError: The model cannot be exported.
        DataError: The checkpoint is damaged or has another model, or the result differs from it.
    """
    cast = None if dtype == "mxfp4" else dtype
    target = open_target(path, like, cast)
    if dtype == "mxfp4":
        target = target._replace(published=published_form(target.origin, target.table))
    files = shards(target, cast)
    reading_lock = contextlib.nullcontext() if target.entry is None else reading(target.entry)
    with reading_lock, working_folder(out, _conversion(target, files, dtype)) as folder:
        target.verify(num_workers)

        def write(unit: Unit, partial: Path, tell: Tell) -> None:
            shard = files[unit.name]
            with partial.open("wb") as file, WriteBehind(file.fileno()) as behind:
                file.write(shard.header)
                made: dict[str, Tensor] = {}
                for tensor in shard.tensors:
                    for part in tensor.stream(target, made):
                        check()
                        behind.note(file.write(raw_bytes(part.to(tensor.dtype))))
                    tell(tensor.size_bytes)

        units = [Unit(name, shard.size_bytes) for name, shard in files.items()]
        run_units(folder, units, write, lambda unit, file, _: files[unit.name].fits(file), num_workers, "exporting")
        with disk_faults(f"write {folder}"):
            _write_side_files(folder, target, files)
        written = HfFolder(folder)
        weights = written if target.published is None else Mxfp4(written)
        check_names(folder, weights, target.table, target.family.carried)
        scales = None if target.published is None else target.published.scales
        sides = Sides(target.table, target.tensors, weights, "folder", target.key, target.carried, scales)
        return prove(sides, num_workers, check)


class Outgoing(NamedTuple):
    name: str
    source: tuple[HfTensor, str] | SafetensorsFile
    """Tensor of the model, for a copy the original, and its key; or the file that it is copied from."""
    dtype: torch.dtype
    shape: Sizes
    """Shape on disk."""
    scales: SafetensorsFile | None = None
    """File with the weight's original scales, if this is the weight's blocks or scales in MXFP4."""

    @property
    def key(self) -> str | None:
        """Key of the model's tensor; None for a tensor that is copied from a file."""
        return None if isinstance(self.source, SafetensorsFile) else self.source[1]

    def stream(self, target: ExportTarget, made: dict[str, Tensor]) -> Iterator[Tensor]:
        """Yields the numbers in disk order, part by part; a copied tensor is a view of its file. `made` has, by name,
        the scales of blocks already written into the same file."""
        if isinstance(self.source, SafetensorsFile):
            yield self.source.tensor(self.name)
        elif self.name in made:
            yield made.pop(self.name)
        else:
            tensor, key = self.source
            parts = stream_tensor(tensor, target.key(key), target.tensors.read)
            yield from parts if self.scales is None else [self._packed(tensor, parts, self.scales, made)]

    def _packed(
        self, tensor: HfTensor, parts: Iterator[Tensor], scales: SafetensorsFile, made: dict[str, Tensor]
    ) -> Tensor:
        """Returns the blocks or the scales of a weight, both of which need the whole weight."""
        weight, name = whole(tensor, parts), tensor.name + SCALES_SUFFIX
        result = packed(tensor.name, weight, scales.tensor(name))
        if self.name == name:
            return result.scales
        # keeps the scales, which are small and come next in a published file
        made[name] = result.scales
        return result.blocks

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class OutgoingFile(NamedTuple):
    tensors: list[Outgoing]
    """Tensors in the order in which they are written."""
    metadata: dict[str, str]

    @property
    def header(self) -> bytes:
        """Bytes before the tensors."""
        return header_of({tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}, self.metadata)

    def fits(self, path: Path) -> bool:
        """Returns whether a file has this size and header; the proof compares the tensors."""
        header = self.header
        with path.open("rb") as file:
            return path.stat().st_size == len(header) + self.size_bytes and file.read(len(header)) == header

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def shards(target: ExportTarget, dtype: torch.dtype | None) -> dict[str, OutgoingFile]:
    """Distributes tensors over files as in the weights' original folder, or else fills one file after another."""
    outgoing = {
        tensor.name: Outgoing(tensor.name, (tensor, filled.key), target.dtype(filled, dtype), tensor.shape)
        for tensor, filled in target.table.tensors()
    }
    copies = {name: outgoing[original]._replace(name=name) for name, original in target.table.copies.items()}
    # copied tensors keep their dtype, since only the model is cast
    outgoing |= {
        name: Outgoing(name, file, file.entries[name].dtype, file.entries[name].shape)
        for name, file in target.carried.items()
    }
    for name, file in {} if target.published is None else target.published.scales.items():
        # blocks and scales replace the weight
        weight, shape = outgoing.pop(name.removesuffix(SCALES_SUFFIX)), file.entries[name].shape
        blocks = weight.name + BLOCKS_SUFFIX
        outgoing[blocks] = weight._replace(name=blocks, dtype=torch.uint8, shape=(*shape, BLOCK_BYTES), scales=file)
        outgoing[name] = weight._replace(name=name, dtype=torch.uint8, shape=shape, scales=file)
    known = copies | outgoing
    files = {
        file: OutgoingFile([known[name] for name in facts["tensors"] if name in known], facts["metadata"])
        for file, facts in files_there(target.described).items()
    }
    if outgoing.keys() <= {item.name for shard in files.values() for item in shard.tensors}:
        return {file: shard for file, shard in files.items() if shard.tensors}
    groups: list[list[Outgoing]] = [[]]
    filled = 0
    for item in outgoing.values():
        if groups[-1] and filled + item.size_bytes > _SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    if len(groups) == 1:
        return {SINGLE_NAME: OutgoingFile(groups[0], {"format": "pt"})}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": OutgoingFile(group, {"format": "pt"})
        for number, group in enumerate(groups, start=1)
    }


def _conversion(target: ExportTarget, files: Mapping[str, OutgoingFile], dtype: object) -> dict[str, Any]:
    """Returns the facts from which a later call recognizes the same conversion."""
    return {
        "program": __version__,
        "source": str(target.path.resolve()),
        "origin": None if target.origin is None else str(target.origin.resolve()),
        "manifest": None if target.entry is None else target.entry.manifest.model_dump(mode="json"),
        "files": {name: [tensor.name for tensor in shard.tensors] for name, shard in files.items()},
        "dtype": str(dtype),
        "main_weights": target.main_weights,
    }


def _write_side_files(folder: Path, target: ExportTarget, files: Mapping[str, OutgoingFile]) -> None:
    origin = target.origin
    chats = put_side_files(folder, target.path, origin, target.tokenizer, added_by(target.model))
    ending = put_ending(folder, origin, target.model) if chats else None
    dtype = next(tensor.dtype for shard in files.values() for tensor in shard.tensors if tensor.key == EMBEDDINGS)
    described = target.described
    config = _config(target, None if described is None else read_json(described / CONFIG_NAME), dtype)
    if ending is not None and ending.is_new:
        config[EOS_KEY] = as_declared(ending.ids)
    chosen = SINGLE_NAME if list(files) == [SINGLE_NAME] else INDEX_NAME
    if config.get(NAMED_WEIGHTS) not in (None, chosen):
        del config[NAMED_WEIGHTS]
    _write_like(folder / CONFIG_NAME, config, None if described is None else described / CONFIG_NAME)
    if chosen == INDEX_NAME:
        original_index = (
            read_json(described / INDEX_NAME) if described is not None and (described / INDEX_NAME).exists() else {}
        )
        size = {"total_size": sum(shard.size_bytes for shard in files.values())}
        placed = sorted((tensor.name, name) for name, shard in files.items() for tensor in shard.tensors)
        metadata = original_index.get("metadata")
        # transformers needs an object, but some indices have null or nothing
        metadata = metadata if isinstance(metadata, dict) else {}
        index = {"metadata": {**metadata, **size}, "weight_map": dict(placed)}
        _write_like(folder / INDEX_NAME, index, None if described is None else described / INDEX_NAME)


def _config(target: ExportTarget, original: dict[str, Any] | None, dtype: torch.dtype) -> dict[str, Any]:
    # an import's config.json already describes its plain weights
    is_plain = target.published is None
    template = original if original is None or (target.is_import and is_plain) else plain_config(original)
    config = target.family.config(target.model, template)
    if original is not None and not is_plain:
        config[FORMAT] = original[FORMAT]
    if original is None and target.context_tokens is not None:
        config["max_position_embeddings"] = target.context_tokens
    name = str(dtype).removeprefix("torch.")
    present = [field for field in _DTYPE_FIELDS if field in config]
    is_other = any(config[field] != name for field in present)
    # a published MXFP4 config.json may omit the dtype of the other weights
    config |= dict.fromkeys(present or (_DTYPE_FIELDS if is_plain else ()), name)
    if target.family.tower is not None and is_other:
        text = target.family.tower.nested(config)
        config[TEXT] = text | dict.fromkeys([field for field in _DTYPE_FIELDS if field in text], name)
    if target.is_import and config == original:
        return config  # exactly as it was imported
    config = dict.fromkeys(_DTYPE_FIELDS, name) | target.family.for_all_versions(config)
    if "rope_theta" not in (text := target.family.text(config)) and "rope_parameters" in text:
        _log.info(
            f"note: transformers 4 cannot express the rotary embeddings of this {target.family.model_type} model, and "
            "would use its defaults; load the export with transformers 5"
        )
    return config


def _write_like(path: Path, content: dict[str, Any], source: Path | None) -> None:
    """Writes JSON, or copies the source byte for byte if it has the same content."""
    if source is not None and source.exists() and read_json(source) == content:
        shutil.copyfile(source, path)
    else:
        write_json(path, content)
