"""How each fault of `mtrain.verify.resume_inject` is planted: one function is replaced while a run goes on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain import build, lr, resume, trainer
from mtrain.config.train import OptimizerSection
from mtrain.data.loader import StepLoader
from mtrain.mcore import checkpoint, optimizer_state, random_state, torch_dist
from mtrain.mcore.optimizer_state import MAIN
from mtrain.mcore.places import optimizer_key
from mtrain.metrics.sinks import JsonlSink
from mtrain.verify.faults import Plant, replaced

_States = Mapping[Tensor, Mapping[str, Tensor]]


def _loading(change: Callable[[Any, _States, int], tuple[_States, int]]) -> Plant:
    """Puts something else into the optimizer than what was read."""
    original = optimizer_state.set_states

    def faulty(optimizer: Any, whole: _States, adam_step: int) -> None:
        original(optimizer, *change(optimizer, whole, adam_step))

    return lambda: replaced(optimizer_state, "set_states", faulty)


def _no_moments(optimizer: Any, whole: _States, adam_step: int) -> tuple[_States, int]:
    return {
        parameter: {name: values if name == MAIN else torch.zeros_like(values) for name, values in states.items()}
        for parameter, states in whole.items()
    }, adam_step


def _rounded(optimizer: Any, whole: _States, adam_step: int) -> tuple[_States, int]:
    return {
        parameter: {**states, MAIN: parameter.detach().float().cpu()} for parameter, states in whole.items()
    }, adam_step


def _shared_step() -> contextlib.AbstractContextManager[None]:
    original = optimizer_state.set_states

    def faulty(optimizer: Any, whole: _States, adam_step: int) -> None:
        original(optimizer, whole, adam_step)
        shared = torch.tensor(float(adam_step))
        for part in optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["step"] = shared

    return replaced(optimizer_state, "set_states", faulty)


def _stale_shard() -> contextlib.AbstractContextManager[None]:
    original = torch_dist.load_tensors

    @torch.no_grad()
    def faulty(reader: Any, tensors: Sequence[Any], may_be_left: Callable[[str], bool], rows: int) -> None:
        weights = tensors[0]
        alike = {weights.key, optimizer_key(MAIN, weights.key)}
        stale = [each for each in tensors if each.key in alike and each.global_offset == weights.global_offset]
        before = weights.data.clone()
        original(reader, tensors, may_be_left, rows)
        if dist.get_rank() == dist.get_world_size() - 1:
            for each in stale:
                each.data.copy_(before)

    return replaced(checkpoint, "load_tensors", faulty)


def _one_step_later() -> contextlib.AbstractContextManager[None]:
    original = resume.take_up
    return replaced(build, "take_up", lambda *arguments: original(*arguments) + 1)


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
    "moments-not-restored": _loading(_no_moments),
    "adam-step-off-by-one": _loading(lambda optimizer, whole, adam_step: (whole, adam_step + 1)),
    "adam-step-shared": _shared_step,
    "main-weights-rounded": _loading(_rounded),
    "stale-shard": _stale_shard,
    "loss-scale-restarted": lambda: replaced(optimizer_state, "set_loss_scaler", lambda optimizer, saved: None),
    "random-states-not-restored": lambda: replaced(random_state, "set_random_states", lambda states: None),
    "records-kept": _kept_records,
}
