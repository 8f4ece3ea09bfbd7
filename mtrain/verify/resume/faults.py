"""How each fault of `mtrain.verify.resume.inject` is planted: one function is replaced while a run goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain.checkpoint.format.writer import Shard
from mtrain.config.schema.train import OptimizerSection
from mtrain.data.loader import StepLoader
from mtrain.mcore.distributed import rng
from mtrain.mcore.engine import optimizer_state
from mtrain.mcore.engine.optimizer_state import MAIN
from mtrain.mcore.state import load, reader
from mtrain.metrics.sinks import JsonlSink
from mtrain.plan import lr
from mtrain.training import build, resume, trainer
from mtrain.verify.planted.planting import Plant, replaced


def _after_loading(change: Callable[[Any, int], None]) -> Plant:
    """Spoils the optimizer after its tensors were read; `change` gets it and Adam's number of updates."""
    original = optimizer_state.set_adam_step

    @torch.no_grad()
    def faulty(optimizer: Any, adam_step: int) -> None:
        original(optimizer, adam_step)
        change(optimizer, adam_step)

    return lambda: replaced(optimizer_state, "set_adam_step", faulty)


def _no_moments(optimizer: Any, adam_step: int) -> None:
    for _, states in optimizer_state.flat_slice_states(optimizer):
        for name, values in states.items():
            if name != MAIN:
                values.zero_()


def _rounded(optimizer: Any, adam_step: int) -> None:
    for portion in optimizer_state.flat_slices(optimizer):
        values = portion.parameter.detach().flatten()[portion.start : portion.end]
        portion.main.copy_(values.view(portion.main.shape))


def _shared_step(optimizer: Any, adam_step: int) -> None:
    shared = torch.tensor(float(adam_step))
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = shared


def _one_update_more() -> contextlib.AbstractContextManager[None]:
    original = optimizer_state.set_adam_step
    return replaced(optimizer_state, "set_adam_step", lambda optimizer, count: original(optimizer, count + 1))


def _stale_shard() -> contextlib.AbstractContextManager[None]:
    original = reader.load_shards

    @torch.no_grad()
    def faulty(saved: Any, parts: Sequence[Shard], may_be_left: Callable[[str], bool], vocab_size: int) -> None:
        before = parts[0].data.clone()
        original(saved, parts, may_be_left, vocab_size)
        if dist.get_rank() == dist.get_world_size() - 1:
            parts[0].data.copy_(before)

    return replaced(load, "load_shards", faulty)


def _one_step_later() -> contextlib.AbstractContextManager[None]:
    original = resume.resume_or_initialize

    def faulty(*arguments: Any) -> resume.Resumed:
        found = original(*arguments)
        return found._replace(step=found.step + 1)

    return replaced(build, "resume_or_initialize", faulty)


def _first_samples() -> contextlib.AbstractContextManager[None]:
    original = StepLoader.iterate
    return replaced(StepLoader, "iterate", lambda loader, from_step: original(loader, 0))


def _restarted_rate() -> contextlib.AbstractContextManager[None]:
    original, first = lr.learning_rate, list[int]()

    def faulty(step: int, optimizer: OptimizerSection, num_steps: int) -> float:
        first.append(step)
        return original(step - first[0], optimizer, num_steps)

    return replaced(trainer, "learning_rate", faulty)


def _kept_records() -> contextlib.AbstractContextManager[None]:
    def faulty(path: Path, start: int) -> JsonlSink:
        return JsonlSink(path, sys.maxsize)

    return replaced(trainer, "JsonlSink", faulty)


PLANTS: dict[str, Plant] = {
    "run-step-off-by-one": _one_step_later,
    "samples-restarted": _first_samples,
    "learning-rate-restarted": _restarted_rate,
    "moments-not-restored": _after_loading(_no_moments),
    "adam-step-off-by-one": _one_update_more,
    "adam-step-shared": _after_loading(_shared_step),
    "main-weights-rounded": _after_loading(_rounded),
    "stale-shard": _stale_shard,
    "loss-scale-restarted": lambda: replaced(optimizer_state, "set_loss_scaler", lambda optimizer, saved: None),
    "random-states-not-restored": lambda: replaced(rng, "set_random_states", lambda states: None),
    "records-kept": _kept_records,
}
