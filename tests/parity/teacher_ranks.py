"""Work of every rank in a parity test with a teacher; the functions for `Pool.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mtrain.arch.layout import Layout
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model
from mtrain.core.layers.build import build_frozen_model
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.step import TrainingStep
from mtrain.core.step.teacher import Teacher
from tests.core.state.gathering import gather_whole
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Built, Outcome, arrays, named_choices, own_microbatches, run_step, set_parameters


class Taught(NamedTuple):
    """Report of a rank."""

    outcome: Outcome
    teacher_moved: bool
    """Whether a bit of the teacher's parameters changed, or one of them got a gradient."""


def train_with_teacher(
    groups: Groups,
    config: Config,
    parameters: Mapping[str, Any],
    teacher_config: Config,
    teacher_parameters: Mapping[str, Any],
    batches: Sequence[GlobalBatch],
) -> Taught:
    """Trains one optimizer step for each global batch, next to a teacher with given global parameters."""
    teacher, frozen = build_teacher(groups, teacher_config, teacher_parameters)
    before = parameter_shards(frozen, teacher.groups)
    sharded = build_model(config, groups)
    set_parameters(sharded.chunks, groups, parameters)
    optimizer = Optimizer(config, sharded, groups)
    objective = replace(Objective.from_config(config.loss, config.model), choices=named_choices(batches[0]))
    model = RankModel(config, groups, sharded, optimizer)
    built = Built(model, TrainingStep(model, objective, teacher))
    steps = [run_step(built, groups, config, batch, number) for number, batch in enumerate(batches)]
    sharded.gather_parameters()
    outcome = Outcome(steps, arrays(gather_whole(parameter_shards(sharded.chunks, groups))))
    after = parameter_shards(frozen, teacher.groups)
    moved = any(not torch.equal(old.data, new.data) for old, new in zip(before, after, strict=True))
    learns = any(parameter.grad is not None for chunk in frozen for parameter in chunk.parameters())
    return Taught(outcome, moved or learns)


def build_teacher(
    groups: Groups, config: Config, parameters: Mapping[str, Any]
) -> tuple[Teacher, list[torch.nn.Module]]:
    """Builds a teacher; returns its chunks, too."""
    own = replace(groups, layout=Layout.from_config(config, groups.layout.world_size))
    chunks = build_frozen_model(config, own)
    set_parameters(chunks, own, parameters)
    return Teacher(config, chunks, own), chunks


def held_logits(
    groups: Groups, config: Config, parameters: Mapping[str, Any], batch: GlobalBatch
) -> tuple[int, list[int]]:
    """Counts the forward passes that the teacher makes before the first microbatch needs its logits, and the pieces of
    logits that are alive after each use."""
    teacher, (chunk, *_) = build_teacher(groups, config, parameters)
    calls: list[object] = []
    chunk.register_forward_hook(lambda *call: calls.append(call[0]))
    count = groups.layout.num_microbatches(len(batch), config.train.micro_batch_size)
    shared = broadcast_batches(own_microbatches(batch, groups, config), count, ["main"], config, groups)
    rows: list[Microbatch] = slice_for_rank(shared, groups)
    logits_of = teacher.logits_of(rows)
    num_early, alive = len(calls), []
    if groups.pp_rank == groups.layout.pp - 1:
        for row in rows:
            logits = logits_of(row)
            assert not logits.hidden.requires_grad
            alive.append(_num_held(logits_of))
    return num_early, alive


def _num_held(logits_of: object) -> int:
    cells = getattr(logits_of, "__closure__", None) or ()
    return sum(len(cell.cell_contents) for cell in cells if isinstance(cell.cell_contents, dict))
