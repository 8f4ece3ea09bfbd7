"""Imports a Hugging Face folder as a checkpoint that a run can start from."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtrain.base.environment import git_checkout, program_versions
from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.tensor_slice import TensorSlice
from mtrain.base.version import __version__
from mtrain.base.yaml_text import yaml_text
from mtrain.checkpoint.format.hashed_file import HashedFile, read_facts
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import GlobalTensor, SavedSlice
from mtrain.checkpoint.format.writer import save_record, write_metadata
from mtrain.checkpoint.store.imported import MODEL_NAME
from mtrain.checkpoint.store.manifest import FileInfo, GitState, Manifest, TrainingState, write_manifest, write_state
from mtrain.checkpoint.store.megatron_checkpoint import LATEST_NAME, RELEASE
from mtrain.convert.carried import CARRIED_NAME, carried_in, keep_published, write_carried
from mtrain.convert.proof import Proof, Sides, prove
from mtrain.convert.work import Unit, is_published, run_units, working_folder
from mtrain.hf.io.block_scaled import plain_config
from mtrain.hf.io.mxfp4 import BLOCKS_SUFFIX, Mxfp4
from mtrain.hf.io.source import HfSource, open_source
from mtrain.hf.schema.description import ADDED_TOKENS
from mtrain.hf.schema.files import CONFIG_NAME, INDEX_NAME, TIKTOKEN_NAME, side_files
from mtrain.hf.schema.registry import ORIGIN, SHARDS_NAME
from mtrain.hf.schema.table import FilledSlice, Table, read_slice, slices_to_write

_FILE_BYTES = 1 << 29
_SLICE_BYTES = 1 << 26
"""Size above which slices are split into rows, so that partial reads and casts need little memory."""


def import_hf(
    path: Path, out: Path, dtype: torch.dtype | None, num_workers: int, depths: int = 0, with_vision: bool = False
) -> Proof:
    """Converts a folder and proves the result.

    Args:
        dtype: Dtype of the checkpoint; None keeps each tensor's own.
        depths: Number of MTP depths to import, for families that have them.
        with_vision: Whether to import the vision tower as part of the model, for families whose tower can be trained.
    """
    source = open_source(path, depths=depths, with_vision=with_vision)
    if depths > source.model.mtp_depths:
        raise DataError(
            f"{path} has {source.model.mtp_depths} MTP depths, but --mtp-depths={depths}; name a folder with them, or "
            "leave the option out"
        )
    dtypes = _dtypes(source, dtype)
    with working_folder(out, _conversion(source, dtype)) as folder:
        known = _write_tensors(folder, source, dtypes, num_workers)
        with disk_faults(f"write {folder}"):
            _write_side_files(folder, source, out)
        written = CheckpointTensors(folder)
        carried = carried_in(folder / ORIGIN, source.family)
        proof = prove(Sides(source.table, written, source.weights, "checkpoint", carried=carried), num_workers)
        with disk_faults(f"write {folder}"):
            _write_manifest(folder, known)
    return proof


def import_for_megatron(path: Path, out: Path, dtype: torch.dtype | None, num_workers: int) -> Proof:
    """Converts a folder into weights that Megatron-LM loads, and proves the result.

    Megatron-Core has the same global tensors as we do; Megatron-LM also needs the folder `release` and a file that
    names it.
    """
    source = open_source(path)
    dtypes = _dtypes(source, dtype)
    with working_folder(out, _conversion(source, dtype) | {"to": "megatron-lm"}) as folder:
        release = folder / RELEASE
        with disk_faults(f"write {release}"):
            release.mkdir()
        known = _write_tensors(folder, source, dtypes, num_workers)
        written = CheckpointTensors(folder)
        proof = prove(Sides(source.table, written, source.weights, "checkpoint"), num_workers)
        with disk_faults(f"write {folder}"):
            write_atomically(folder / LATEST_NAME, f"{RELEASE}\n")
            for name in known:
                (folder / name).rename(release / name)
    return proof


def _write_tensors(
    folder: Path, source: HfSource, dtypes: Mapping[str, torch.dtype], num_workers: int
) -> dict[str, FileInfo]:
    files = _files(source.table, dtypes)

    def write(unit: Unit, partial: Path, tell: Callable[[int], None]) -> dict[str, Any]:
        slices: list[Any] = []
        with HashedFile(partial) as file:
            for part in files[unit.name]:
                start, key = file.tell(), part.source.key
                values = read_slice(part.source, part.at, source.weights.tensor)
                save_record(values.to(dtypes[key]), file)
                slices.append([key, *part.at, start, file.tell() - start])
                tell(part.size_bytes)
            return {"slices": slices, "file": file.finish().model_dump()}

    units = [Unit(name, sum(part.size_bytes for part in parts)) for name, parts in files.items()]

    def is_whole(unit: Unit, file: Path, facts: dict[str, Any]) -> bool:
        return read_facts(file) == FileInfo.model_validate(facts["file"])

    known = run_units(folder, units, write, is_whole, num_workers, "importing")
    saved = []
    for name, facts in known.items():
        for key, offset, shape, *extent in facts["slices"]:  # start and length in the file, in bytes
            at = TensorSlice(tuple(offset), tuple(shape))  # JSON makes lists of tuples
            slices_of_tensor = (SavedSlice(at, name, *extent),)
            saved.append((key, GlobalTensor(dtypes[key], source.table.shapes[key], slices_of_tensor)))
    with disk_faults(f"write {folder}"):
        listed = write_metadata(folder, saved)
    return {name: FileInfo.model_validate(facts["file"]) for name, facts in known.items()} | listed


class _SliceToWrite(NamedTuple):
    source: FilledSlice
    at: TensorSlice
    size_bytes: int


def _dtypes(source: HfSource, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for tensor, filled in source.table.tensors():
        stored = source.weights.facts(tensor.name)[0]
        chosen = stored if dtype is None or filled.keeps_dtype else dtype
        if dtypes.setdefault(filled.key, chosen) != chosen:
            raise DataError(
                f"{source.folder.path}: {tensor.name} is {chosen}, but other tensors of {filled.key} are "
                f"{dtypes[filled.key]}; choose one dtype with --dtype"
            )
    return dtypes


def _files(table: Table, dtypes: Mapping[str, torch.dtype]) -> dict[str, list[_SliceToWrite]]:
    """Distributes slices over data files of about half a gigabyte; returns file name -> slices."""
    files: list[list[_SliceToWrite]] = [[]]
    size_bytes = 0
    for filled in table.slices:
        itemsize = dtypes[filled.key].itemsize
        is_whole = any(tensor.arrangement.is_reordered for tensor in filled.tensors)
        if size_bytes >= _FILE_BYTES:
            files.append([])
            size_bytes = 0
        for whole in slices_to_write(filled):
            for at in whole.cut(1 << 62 if is_whole else _SLICE_BYTES // itemsize):
                files[-1].append(_SliceToWrite(filled, at, itemsize * at.num_elements))
                size_bytes += files[-1][-1].size_bytes
    return {f"__0_{number}.distcp": slices for number, slices in enumerate(files)}


def _conversion(source: HfSource, dtype: torch.dtype | None) -> dict[str, Any]:
    """Returns the facts from which a later call recognizes the same conversion."""
    files = {name: file.path.stat() for name, file in source.folder.files.items()}
    return {
        "program": __version__,
        "source": str(source.folder.path.resolve()),
        "config": source.folder.config,
        "files": {name: [facts.st_size, facts.st_mtime_ns] for name, facts in files.items()},
        "dtype": str(dtype),
        "depths": source.model.mtp_depths,
        **({"vision": True} if source.model.vision is not None else {}),
    }


def _write_side_files(folder: Path, source: HfSource, out: Path) -> None:
    """Writes the counters, the model's configuration, and copies of the files that came with the weights."""
    write_state(
        folder,
        TrainingState(
            step=0,
            consumed_samples=0,
            adam_step=0,
            loss_scaler=None,
            layout="imported",
            device="cpu",
            vocab_size=source.model.vocab_size,
        ),
    )
    origin = folder / ORIGIN
    origin.mkdir(exist_ok=True)
    if carried := carried_in(source.folder.path, source.family):
        write_carried(origin / CARRIED_NAME, carried)
    if isinstance(source.weights, Mxfp4):
        keep_published(origin, source.folder)
    config = plain = source.folder.config
    if source.weights is not source.folder:
        plain = plain_config(config) | {"dtype" if "dtype" in config else "torch_dtype": "bfloat16"}
    copies = [Path(CONFIG_NAME)] if plain == config else []
    if source.folder.has_index:
        copies.append(Path(INDEX_NAME))
    for path in [*copies, *side_files(source.folder.path)]:
        (origin / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.folder.path / path, origin / path)
    weight_names, shards = source.weights.names(), dict[str, Any]()
    for shard, file in source.folder.files.items():
        tensors = {stored.removesuffix(BLOCKS_SUFFIX): entry.shape for stored, entry in file.entries.items()}
        kept = {tensor: shape for tensor, shape in tensors.items() if tensor in weight_names}
        shards[shard] = {"metadata": file.metadata, "tensors": kept}
    if plain != config:
        write_atomically(origin / CONFIG_NAME, json.dumps(plain, indent=2) + "\n")
    write_atomically(origin / SHARDS_NAME, json.dumps(shards) + "\n")
    write_atomically(folder / MODEL_NAME, _model_yaml(source, out.resolve()))


def _model_yaml(source: HfSource, out: Path) -> str:
    """Returns the part of a configuration with which a run starts from these weights."""
    content: dict[str, Any] = {
        # without `megatron` if the folder sets none of its fields, which leaves them to the user
        "model": source.model.model_dump(
            exclude={"hf", "backend", *ADDED_TOKENS} | ({"megatron"} if not source.model.megatron else set())
        ),
        "checkpoint": {"initialize_from": str(out)},
    }
    names = {path.name for path in side_files(source.folder.path)}
    if "tokenizer.json" in names or any(name.endswith(".model") for name in names - {TIKTOKEN_NAME}):
        content["data"] = {"tokenizer": str(out / ORIGIN)}
    return (
        f"# {source.family.model_type} from {source.folder.path}, by mtrain {__version__}; name this file last:\n"
        f"#   mtrain train configs/run/finetune.yaml {out / MODEL_NAME} run.dir=runs/finetune\n" + yaml_text(content)
    )


def _write_manifest(folder: Path, known: dict[str, FileInfo]) -> None:
    paths = [path for path in [*folder.iterdir(), *(folder / ORIGIN).rglob("*")] if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths if is_published(path)]
    checkout = git_checkout()
    manifest = Manifest(
        step=0,
        layout="imported",
        config_hash=hashlib.sha256((folder / MODEL_NAME).read_bytes()).hexdigest(),
        versions=program_versions(),
        git=None if checkout is None else GitState(**checkout._asdict()),
        files={name: known.get(name) or read_facts(folder / name) for name in names},
    )
    write_manifest(folder, manifest)
