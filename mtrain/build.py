"""Builds a run: who is there, before anything happens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrain.checkpoint.directory import checkpoint_at
from mtrain.config import Config, guards
from mtrain.data.loader import StepLoader
from mtrain.evaluate import ValidationSet
from mtrain.layout import Layout
from mtrain.loss.terms import Objective
from mtrain.mcore.groups import Groups, open_groups
from mtrain.mcore.model import build_model
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.teacher import Teacher, teacher_config
from mtrain.mcore.verified import opened_checkpoint
from mtrain.mcore.world import on_first_rank
from mtrain.resume import announced, say, take_up
from mtrain.run_folder import RunFolder
from mtrain.step import TrainingStep


@dataclass(frozen=True)
class Run:
    """Everything that takes part in training on this rank."""

    config: Config
    groups: Groups
    chunks: list[Any]
    """Model chunks in DDP, one for each virtual pipeline stage."""
    optimizer: Optimizer
    objective: Objective
    teacher: Teacher | None
    """Where a loss function compares with one."""
    training: TrainingStep
    loader: StepLoader | None
    """None on ranks that receive their data from tensor-parallel rank 0."""
    validation: ValidationSet | None
    start_step: int
    """Optimizer updates already completed."""


def build_run(config: Config, layout: Layout, device: torch.device, folder: RunFolder) -> Run:
    """Opens the groups, builds the model and the optimizer, and takes up the newest checkpoint. Collective.

    Raises:
        ConfigError: A loss function or a backend is not there.
        DataError: Data or a checkpoint is missing or damaged.
        RunFolderError: checkpoint.resume=never, but the run folder holds a checkpoint.
    """
    objective = Objective.from_config(config.loss, config.model.mtp_depths)
    groups = open_groups(layout, device, config.train.seed, config.train.process_group_timeout_s)
    if groups.rank == 0:
        for note in guards.notes(config):
            print(f"note: {note}", flush=True)
    loader = StepLoader(config, groups.dp_rank, layout.dp) if groups.tp_rank == 0 else None
    chunks = build_model(config, groups)
    optimizer = Optimizer(config, chunks, groups)
    teacher = load_teacher(config, groups)
    training = TrainingStep(config, groups, chunks, optimizer, objective, teacher)
    validation = ValidationSet.open(loader)
    start_step = take_up(config, folder, groups, chunks, optimizer, loader)
    return Run(config, groups, chunks, optimizer, objective, teacher, training, loader, validation, start_step)


def load_teacher(config: Config, groups: Groups) -> Teacher | None:
    """The teacher of `loss.teacher`; None where there is none. Collective over the world.

    Raises:
        ConfigError: Its model does not fit this run.
        DataError: There is no checkpoint, or it is damaged.
    """
    if config.loss.teacher is None:
        return None
    source = Path(config.loss.teacher.checkpoint)
    with opened_checkpoint(lambda unusable: checkpoint_at(source, unusable), say) as newest:
        entry = announced(newest)
        assert entry is not None, "checkpoint_at raises where there is none"
        teachers = on_first_rank(lambda: teacher_config(config, entry.path))
        return Teacher.load(teachers, entry, groups)
