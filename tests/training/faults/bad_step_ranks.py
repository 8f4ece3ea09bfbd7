"""Rank side of the tests of bad steps: runs of the real trainer, and the weights that they began with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mtrain.base import fault_points
from mtrain.base.signals import StopSignal
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.training_state import local_state
from mtrain.core.loss.pair import LossPair, TermInputs, weigh
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.data.loader import Prefetch, StepLoader
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run, build_run
from mtrain.training.trainer import train_on
from tests.core.state.gathering import gather_whole
from tests.training.faults.numeric_fault_ranks import Ending, run


def poisoned(inputs: TermInputs, token: int) -> LossPair:
    """Computes the loss of next tokens; nan on the ranks that hold a token of this id."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(torch.where((inputs.tokens == token).any(), torch.nan, numerator), denominator)


def raised(inputs: TermInputs, token: int, factor: float) -> LossPair:
    """Computes the same loss, times `factor` on those ranks."""
    numerator, denominator = weigh(inputs.logits.cross_entropy(inputs.labels), inputs)
    return LossPair(torch.where((inputs.tokens == token).any(), factor * numerator, numerator), denominator)


class Outcome(NamedTuple):
    """Result of a run on one rank."""

    ending: Ending
    initial: dict[str, Any] | None
    """Parameters by global name before the first step, as numpy; on rank 0."""


def watched(groups: Groups, config: Config, fault: str | None = None) -> Outcome:
    """Makes one start of a run."""
    seen: list[dict[str, Any] | None] = []

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        built = build_run(config, groups, folder)
        whole = gather_whole(parameter_shards(built.model.chunks, groups))
        seen.append(None if whole is None else {name: value.numpy() for name, value in whole.items()})
        return built

    return Outcome(run(groups, config, fault, build), seen[0])


class Standing(NamedTuple):
    """The whole state from which a rank goes on."""

    tensors: dict[str, Any]
    """Weights, main weights, moments and random states as numpy, by name and place."""
    adam_step: int
    scaler: Any


class _LeavesOut:
    """A loader that leaves out one step."""

    def __init__(self, loader: StepLoader, step: int) -> None:
        self._loader, self._step = loader, step

    def iterate(self, from_step: int, pinned: bool = False) -> Prefetch[list[Microbatch]]:
        """Iterates like the loader, without that step."""
        return Prefetch(lambda each: self._loader.batches(each + (each + 1 >= self._step)), from_step, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def standing_after(groups: Groups, config: Config, left_out: int | None = None) -> Standing:
    """Trains to the end; `left_out`, counted from 1, is a step that the loader leaves out."""
    built: list[Run] = []

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        made = build_run(config, groups, folder)
        if left_out is not None and made.loader is not None:
            loader: Any = _LeavesOut(made.loader, left_out)
            made = replace(made, loader=loader)
        built.append(made)
        return made

    train_on(groups, config, StopSignal(), build)
    model = built[0].model
    model.sharded.gather_parameters()
    tensors = {f"{each.shard.key}{each.shard.at}": each.shard.data for each in local_state(model)}
    tensors["random"] = torch.get_rng_state()
    copies = {name: values.detach().float().numpy().copy() for name, values in tensors.items()}
    return Standing(copies, model.optimizer.state.adam_step(), model.optimizer.state.loss_scaler())


def with_hook(groups: Groups, config: Config, rank: int, step: int, name: str) -> Ending:
    """Runs with a backward pass of one rank that gives nan in one parameter, in one step."""

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        made = build_run(config, groups, folder)
        if groups.rank == rank:
            parameter = dict(_named_parameters(made.model.chunks))[name]
            passes = iter(range(1, 1000))
            spoil: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: (  # noqa: E731
                gradient * torch.nan if next(passes) == step else gradient
            )
            parameter.register_hook(spoil)
        return made

    return run(groups, config, None, build)


def _named_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield name.removeprefix("module.").removeprefix("module."), parameter


def spoiled_once(groups: Groups, config: Config, fault: str) -> Ending:
    """Runs with a fault that damages the state when its step is first reached, and not again."""

    def build(config: Config, groups: Groups, folder: RunFolder) -> Run:
        built = build_run(config, groups, folder)
        return replace(built, training=_ForgetsFaults(built.model, built.objective))

    return run(groups, config, fault, build)


class _ForgetsFaults(TrainingStep):
    """Removes the fault's name when the step after it is made."""

    _made = 0

    def forward_backward(self, *arguments: Any, **named: Any) -> Any:
        """Makes a step; by then the fault has struck in the step before."""
        self._made += 1
        text = os.environ.get(fault_points.VARIABLE)
        if text is not None and self._made > fault_points.InjectedFault.parsed(text).step:
            del os.environ[fault_points.VARIABLE]
        return super().forward_backward(*arguments, **named)
