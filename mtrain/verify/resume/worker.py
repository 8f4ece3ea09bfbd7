"""Work of each rank for one start: the real trainer on its run folder, observed from outside."""

import contextlib
import hashlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.arch.adapters import is_learned_whole
from mtrain.base.signals import StopSignal
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.state.gather import gradient_shards, parameter_shards
from mtrain.checkpoint.store.steps import step_name
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.images import MicrobatchImages
from mtrain.core.engine.loss_reduction import StepTotals
from mtrain.core.engine.optimizer import Update
from mtrain.core.engine.optimizer_state import MAIN, STATES
from mtrain.core.engine.training_state import WEIGHTS, Held, local_state
from mtrain.core.layers.adapters.adapter import is_adapter_key
from mtrain.core.ranks import rng
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard
from mtrain.core.step.step import TrainingStep
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run, build_run
from mtrain.training.trainer import train_on
from mtrain.verify.core.samples import SamplePlan, SamplePositions
from mtrain.verify.core.weights import TABLES, Whole, gathered
from mtrain.verify.core.worker import small_teacher

SAMPLE = 4096
"""Elements of a tensor that are kept to measure a deviation; only the digest covers all elements."""


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    config: Config
    samples: SamplePlan
    """The user's data; if their vocabulary is larger than the model's, token ids are taken modulo the model's."""
    watched_from: int = 0
    """Completed updates from which the state is recorded."""
    stop_after: int | None = None
    """Update after which the last rank requests a stop; None: no stop."""
    crash_in: int | None = None
    """Update during which the last rank kills itself; None: no crash."""
    gathers: bool = False
    """Whether to gather whole gradients and weights of each step, and compare the loaded state with the files."""
    fault: str | None = None


class Fingerprint(NamedTuple):
    """Summary of a tensor for comparison."""

    digest: str
    sample: NDArray[Any]
    """About SAMPLE elements or fewer, evenly spaced."""


@dataclass(frozen=True)
class State:
    """State of a rank after some updates."""

    tensors: dict[tuple[str, str], Fingerprint]
    counters: dict[str, float]


@dataclass
class SegmentResult:
    """Result of one start on a rank."""

    start_step: int = 0
    states: dict[int, State] = field(default_factory=dict)
    """States by completed updates; the first is the loaded one."""
    samples: dict[int, dict[int, str]] = field(default_factory=dict)
    """Digests of samples by step, from 1, and slot in the global batch."""
    differing_tensors: list[tuple[str, str, float]] = field(default_factory=list)
    """Tensors whose loaded bits differ from the files: kind, name, share of bytes."""
    initial: dict[str, Whole] = field(default_factory=dict)
    steps: list[tuple[Whole, Whole]] = field(default_factory=list)
    """Gradients and new weights of each step, for comparison with exact values, on rank 0."""


def run_start(groups: Groups, start: Start) -> SegmentResult:
    """Trains from the run folder until the end, a stop or a crash. Collective."""
    seen = SegmentResult()

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        run = build_run(config, groups, folder, small_teacher, start.samples.user_model(config.model))
        if start.fault is not None:
            PLANTS[start.fault](run)
        watched = WatchedStep(run, start, seen)
        watched.begin(folder)
        return replace(run, training=watched)

    with contextlib.redirect_stdout(io.StringIO()):
        train_on(groups, start.config, StopSignal(), build)
    return seen


@torch.no_grad()
def _forget_moments(run: Run) -> None:
    for _, states in run.model.optimizer.state.flat_slice_states():
        for name, values in states.items():
            if name != MAIN:
                values.zero_()


PLANTS: dict[str, Callable[[Run], None]] = {"moments-not-restored": _forget_moments}
"""Faults by name; each spoils the resumed run."""


class WatchedStep(TrainingStep):
    """Training step that records its inputs and outputs, and stops or crashes as `Start` says."""

    def __init__(self, run: Run, start: Start, seen: SegmentResult) -> None:
        super().__init__(run.model, run.objective, run.teacher)
        self._run, self._start, self._seen = run, start, seen
        self._is_last_rank = run.model.groups.rank == run.model.groups.layout.world_size - 1
        self._done = run.start_step

    def begin(self, folder: RunFolder) -> None:
        """Records the loaded state."""
        run, seen = self._run, self._seen
        seen.start_step = run.start_step
        self._note_state()
        if self._start.gathers:
            path = folder.checkpoints / step_name(run.start_step)
            seen.differing_tensors = list(self._differing_tensors(path)) if path.exists() else []
            initial = {kind: self._whole(kind) for kind in (WEIGHTS, *STATES)}
            seen.initial = {kind: whole for kind, whole in initial.items() if whole is not None}

    def forward_backward(self, batches: Sequence[Microbatch] | None, stop_requested: bool = False) -> StepTotals:
        folded = self._folded(batches)
        if folded is not None:
            self._seen.samples[self._done + 1] = self._digests(folded)
        stops = self._is_last_rank and self._start.stop_after == self._done + 1
        totals = super().forward_backward(folded, stop_requested or stops)
        if self._is_last_rank and self._start.crash_in == self._done + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return totals

    def try_weights(self, batches: Sequence[Microbatch] | None) -> None:
        super().try_weights(self._folded(batches))

    def update(
        self, totals: StepTotals, lr: float, judge: Callable[[float], None] = lambda grad_norm: None
    ) -> Update | None:
        gathers, run = self._start.gathers, self._run
        gradients = gathered(gradient_shards(run.model.sharded, run.model.groups)) if gathers else None
        update = super().update(totals, lr, judge)
        self._done += 1
        self._note_state()
        if gathers:
            weights = gathered(parameter_shards(run.model.chunks, run.model.groups))
            if gradients is not None and weights is not None:
                self._seen.steps.append((gradients, weights))
        return update

    def _note_state(self) -> None:
        """Records the state from `watched_from` on, which is collective: gathers parameters; one all-reduce."""
        if self._done < self._start.watched_from:
            return
        run = self._run
        run.model.sharded.gather_parameters()
        parts_by_tensor: dict[tuple[str, str], list[torch.Tensor]] = {}
        for tensor in local_state(run.model):
            parts_by_tensor.setdefault((tensor.kind, tensor.name), []).append(tensor.shard.data)
        for name, values in rng.random_states(run.model.groups).items():
            parts_by_tensor["random", name] = [values]
        tensors = {key: _fingerprint(parts) for key, parts in parts_by_tensor.items()}
        counters = {"adam_step": float(run.model.optimizer.state.adam_step())}
        scaler = run.model.optimizer.state.loss_scaler()
        if scaler is not None:
            counters |= {f"loss_scaler.{name}": float(value) for name, value in scaler.model_dump().items()}
        self._seen.states[self._done] = State(tensors, counters)

    def _differing_tensors(self, path: Path) -> Iterator[tuple[str, str, float]]:
        """Yields this rank's tensors whose bits differ from the checkpoint, except vocabulary padding."""
        files, run = CheckpointTensors(path), self._run
        for tensor in local_state(run.model):
            region = self._rows_of_tokens(tensor)
            adapter = run.model.config.adapter
            is_frozen = adapter is not None and not (
                is_adapter_key(tensor.name) or is_learned_whole(run.model.config.model, adapter, tensor.name)
            )
            if region.num_elements == 0 or is_frozen:  # files hold trained tensors only
                continue
            loaded = region.within(tensor.shard.at).of(tensor.shard.data.view(tensor.shard.at.shape)).cpu()
            saved = files.read(tensor.shard.key, region)
            share = 1.0 if loaded.dtype != saved.dtype else float((_bytes(loaded) != _bytes(saved)).mean())
            if share > 0:
                yield tensor.kind, tensor.name, share

    def _rows_of_tokens(self, tensor: Held) -> TensorSlice:
        """Returns the slice of a tensor without padding rows."""
        offset, shape = tensor.shard.at
        if tensor.name not in TABLES:
            return tensor.shard.at
        rows = max(0, min(shape[0], self._run.model.config.model.vocab_size - offset[0]))
        return TensorSlice(offset, (rows, *shape[1:]))

    def _whole(self, kind: str) -> Whole | None:
        """Gathers one kind of state on rank 0, None elsewhere, in one gather of objects."""
        run = self._run
        shards = []
        for tensor in local_state(run.model):
            if tensor.kind == kind:
                (_, global_shape, (offset, shape), data, _), axes = tensor.shard, tensor.num_stacked
                values = data.detach().float().cpu().clone().view(shape[axes:])
                shards.append(Shard(tensor.name, global_shape[axes:], TensorSlice(offset[axes:], shape[axes:]), values))
        return gathered(shards)

    def _folded(self, batches: Sequence[Microbatch] | None) -> Sequence[Microbatch] | None:
        """Takes token ids modulo the model's vocabulary."""
        size = self._run.model.config.model.vocab_size
        if batches is None or self._start.samples.user_vocab_size <= size:
            return batches
        return [batch.with_vocabulary(size) for batch in batches]

    def _digests(self, batches: Sequence[Microbatch]) -> dict[int, str]:
        """Digests tokens, labels, weights and images of each sample by slot."""
        loader = self._run.loader
        assert loader is not None, "this rank reads"
        positions = SamplePositions(loader.plan(self._done), loader.samples(self._done))
        digests = {}
        for number, batch in enumerate(batches):
            slots, _ = torch.from_numpy(positions.of(number, self._run.model.groups.dp_rank, batch.tokens.shape[1]))
            for slot in slots[slots >= 0].unique().tolist():
                parts = [rows[slots == slot] for rows in (batch.tokens, batch.labels, *batch.weights.values())]
                parts += _images_at(slots == slot, batch.images)
                digests[slot] = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
        return digests


def _images_at(is_sample: torch.Tensor, images: MicrobatchImages | None) -> list[torch.Tensor]:
    """Returns patches and positions of a sample's images; nothing for text, whatever else is in its microbatch."""
    places = torch.empty(0) if images is None else images.places[is_sample]
    if images is None or not (places >= 0).any():
        return []
    features = images.pixels.view(int(images.places.max()) + 1, -1)
    return [features[places[places >= 0]], places >= 0, images.axes[is_sample]]


def _fingerprint(parts: Sequence[torch.Tensor]) -> Fingerprint:
    digest, samples = hashlib.sha256(), []
    count = sum(part.numel() for part in parts)
    stride = max(1, -(-count // SAMPLE))
    for part in parts:
        flat = part.detach().flatten().cpu()
        digest.update(_bytes(flat).data)
        samples.append(flat[::stride].float().numpy())
    return Fingerprint(digest.hexdigest(), np.concatenate(samples))


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Returns the bytes of a tensor, 1-D; bytes of nan are equal, unlike nan itself."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy()
