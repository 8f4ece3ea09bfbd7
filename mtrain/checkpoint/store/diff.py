"""Lists the contents of a checkpoint, and compares two checkpoints, even from different layouts.

Listing reads only metadata, even of Megatron-LM's and Megatron-Bridge's checkpoints; comparing reads one saved slice at
a time.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.format.safe_metadata import GlobalTensor
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.manifest import STATE_NAME, Manifest, TrainingState, read_state
from mtrain.checkpoint.store.megatron_checkpoint import megatron_folder

OPTIMIZER, RANDOM = "optimizer", "random states"
WEIGHTS = "weights"


class Contents(NamedTuple):
    """Metadata of an opened checkpoint."""

    folder: Path
    tensors: CheckpointTensors
    manifest: Manifest | None
    """None for checkpoints of other programs."""
    state: TrainingState | None
    warnings: tuple[str, ...]
    """Reports of newer, damaged checkpoints that were skipped."""


class Total(NamedTuple):
    num_tensors: int
    num_elements: int
    size_bytes: int


def contents_of(path: Path) -> Contents:
    """Opens a checkpoint, a run folder's newest good checkpoint, or one of Megatron-LM or Megatron-Bridge."""
    megatron = megatron_folder(path)
    if megatron is not None:
        return Contents(megatron, CheckpointTensors(megatron), None, None, ())
    newest = checkpoint_at(path)
    assert newest.entry is not None, "checkpoint_at raises without one"
    folder = newest.entry.path
    state = read_state(folder) if (folder / STATE_NAME).exists() else None
    return Contents(folder, CheckpointTensors(folder), newest.entry.manifest, state, newest.warnings)


def group_of(key: str) -> str:
    """Returns the group of a tensor: WEIGHTS, OPTIMIZER or RANDOM."""
    # megatron-core's ChainedOptimizer prefixes the states of several optimizers with `chained_N.`
    if key.startswith(("optimizer.", "chained_")):
        return OPTIMIZER
    return RANDOM if key.startswith(("rng.", "rng_state")) else WEIGHTS


def size_bytes(tensor: GlobalTensor) -> int:
    """Returns the size of the tensor's values, without the overhead of files."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def totals(contents: Contents) -> dict[tuple[str, str], Total]:
    """Sums up the tensors of each (group, dtype)."""
    sums: dict[tuple[str, str], Total] = {}
    for key, tensor in contents.tensors.tensors.items():
        kind = group_of(key), str(tensor.dtype).removeprefix("torch.")
        total = sums.get(kind, Total(0, 0, 0))
        sums[kind] = Total(
            total.num_tensors + 1, total.num_elements + math.prod(tensor.shape), total.size_bytes + size_bytes(tensor)
        )
    return sums


def described(contents: Contents) -> dict[str, str]:
    """Describes a checkpoint for people, from its metadata: name -> value."""
    shown = {"checkpoint": str(contents.folder)}
    if contents.manifest is None:
        return shown | {"written by": "another program (torch_dist), without manifest and checksums"}
    manifest = contents.manifest
    shown |= {"step": str(manifest.step), "tokens": f"{manifest.tokens:,}", "layout": manifest.layout}
    if contents.state is not None:
        shown |= {"vocabulary": str(contents.state.vocab_size), "device": contents.state.device}
    shown |= {"versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items())}
    shown |= {"configuration": f"SHA-256 {manifest.config_hash}"}
    if manifest.dataset is not None:
        shown["data"] = f"fingerprint {manifest.dataset}"
    if manifest.inputs:
        shown["inputs"] = "; ".join(f"{key}: fingerprint {value}" for key, value in manifest.inputs.items())
    if manifest.git is not None:
        shown["git"] = manifest.git.commit + (" with local changes" if manifest.git.dirty else "")
    if manifest.valid_loss is not None:
        shown["validation"] = f"{manifest.valid_loss} nats"
    if manifest.changes:
        shown["changed"] = "; ".join(
            f"after step {change.step} {change.key}: {change.old or 'missing'} -> {change.new or 'missing'}"
            for change in manifest.changes
        )
    if manifest.skipped:
        shown["left out"] = "; ".join(f"step {skipped.step}: {skipped.reason}" for skipped in manifest.skipped)
    size = sum(facts.size_bytes for facts in manifest.files.values())
    return shown | {"files": f"{len(manifest.files)}, {size:,} bytes"}


class Compared(NamedTuple):
    """Comparison of one tensor that both checkpoints have."""

    key: str
    num_elements: int
    num_differing: int
    """Number of elements whose bits differ, or for different dtypes, whose values differ."""
    largest_difference: float
    """Largest absolute difference; inf if only one of two elements is nan."""
    largest: float
    """Largest absolute value in the first checkpoint."""
    dtypes: tuple[str, str]

    @property
    def relative(self) -> float:
        """Largest difference relative to the largest element."""
        if self.largest_difference == 0:
            return 0.0
        return self.largest_difference / self.largest if self.largest > 0 else math.inf


class Differences(NamedTuple):
    """Differences between two checkpoints."""

    missing: tuple[str, ...]
    """Keys that only the first has."""
    extra: tuple[str, ...]
    """Keys that only the second has."""
    misshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    compared: tuple[Compared, ...]
    """Tensors that both checkpoints have, with the largest relative difference first."""
    left_out: tuple[str, ...]
    """Random states, which cannot be compared between different numbers of ranks."""

    @property
    def is_equal(self) -> bool:
        """Whether both checkpoints have the same tensors with the same bits."""
        differs = any(tensor.num_differing or tensor.dtypes[0] != tensor.dtypes[1] for tensor in self.compared)
        return not (self.missing or self.extra or self.misshaped or differs)


def differences(a: Contents, b: Contents) -> Differences:
    """Compares all tensors; needs memory for two slices. Ignores vocabulary padding if both checkpoints have a
    training state, which says how many rows are tokens."""
    ours, theirs = a.tensors.tensors, b.tensors.tensors
    both = [key for key in ours if key in theirs]
    shapes = {key: _shapes(key, a, b) for key in both}
    unlike = [key for key in both if shapes[key][0] != shapes[key][1]]
    # keys that only one has, and those whose shapes differ (^ binds more tightly than |)
    left_out = [key for key in ours.keys() ^ theirs.keys() | set(unlike) if group_of(key) == RANDOM]
    compared = [_compared(key, shapes[key][0], a, b) for key in both if key not in unlike]
    return Differences(
        missing=tuple(key for key in ours if key not in theirs and key not in left_out),
        extra=tuple(key for key in theirs if key not in ours and key not in left_out),
        misshaped=tuple((key, *shapes[key]) for key in unlike if key not in left_out),
        compared=tuple(sorted(compared, key=lambda result: (-result.relative, -result.num_differing, result.key))),
        left_out=tuple(sorted(left_out)),
    )


def _shapes(key: str, a: Contents, b: Contents) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tensor's shape in both checkpoints, without padding rows if their number is known."""
    shapes = (a.tensors.tensors[key].shape, b.tensors.tensors[key].shape)
    if not key.endswith(PADDED_TABLES) or a.state is None or b.state is None:
        return shapes
    first, second = ((min(state.vocab_size, shape[0]), *shape[1:]) for state, shape in zip((a.state, b.state), shapes))
    return first, second


def _compared(key: str, shape: tuple[int, ...], a: Contents, b: Contents) -> Compared:
    ours, theirs = a.tensors.tensors[key], b.tensors.tensors[key]
    count, worst, largest = 0, 0.0, 0.0
    # slices of the first checkpoint, which are read without a copy; the second copies if its layout differs
    for saved in ours.slices:
        region = saved.at.intersect(TensorSlice.whole(shape))
        if region is None:
            continue
        first, second = (side.tensors.read(key, region) for side in (a, b))
        largest = max(largest, _largest(first))
        # the usual case needs no temporary; bits, so that -0.0 and the payloads of nan count as different
        if ours.dtype == theirs.dtype and torch.equal(_bits(first), _bits(second)):
            continue
        differing = _differing(first, second)
        count += int(differing.sum())
        worst = max(worst, _largest_difference(first, second, differing))
    dtypes = (str(ours.dtype).removeprefix("torch."), str(theirs.dtype).removeprefix("torch."))
    return Compared(key, math.prod(shape), count, worst, largest, dtypes)


def _differing(first: Tensor, second: Tensor) -> Tensor:
    """Returns where two tensors differ, [elements] bool."""
    if first.dtype != second.dtype:
        # float64 holds every number of the smaller dtypes exactly
        return (first.double() != second.double()).view(-1)
    width = first.element_size()
    first_bytes, second_bytes = (_bits(tensor).view(-1, width) for tensor in (first, second))
    return (first_bytes != second_bytes).any(dim=1)


def _largest_difference(a: Tensor, b: Tensor, differing: Tensor) -> float:
    first_values, second_values = (tensor.reshape(-1)[differing].double() for tensor in (a, b))
    difference = (first_values - second_values).abs()
    # inf - inf is nan, so equal infinities would look like a difference
    is_same = (first_values == second_values) | (first_values.isnan() & second_values.isnan())
    return _maximum(difference.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(is_same, 0.0))


def _largest(tensor: Tensor) -> float:
    # without nan and inf, which would make every relative difference 0
    values = tensor.abs().double() if tensor.dtype != torch.bool else tensor.double()
    return _maximum(values.nan_to_num(nan=0.0, posinf=0.0))


def _maximum(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, which are equal even for nan."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
