"""Builds a run: who is there, before anything happens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtrain.checkpoint.directory import CheckpointEntry, Newest, checkpoint_at, newest_good
from mtrain.config import Config, guards
from mtrain.data.loader import StepLoader
from mtrain.errors import RunFolderError
from mtrain.evaluate import ValidationSet
from mtrain.layout import Layout
from mtrain.loss.terms import Objective
from mtrain.mcore.checkpoint import load_checkpoint, load_weights
from mtrain.mcore.groups import Groups, open_groups
from mtrain.mcore.model import build_model
from mtrain.mcore.optimizer import Optimizer
from mtrain.mcore.teacher import Teacher, teacher_config
from mtrain.mcore.world import on_first_rank
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
    objective = Objective.from_config(config.loss)
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
    start_step = _take_up(config, folder, groups, chunks, optimizer)
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

    def found() -> tuple[CheckpointEntry, Config]:
        entry = _announced(checkpoint_at(source))
        assert entry is not None, "checkpoint_at raises where there is none"
        return entry, teacher_config(config, entry.path)

    entry, teachers = on_first_rank(found)
    return Teacher.load(teachers, entry, groups)


def _take_up(config: Config, folder: RunFolder, groups: Groups, chunks: list[Any], optimizer: Optimizer) -> int:
    """Loads the run's newest checkpoint, else the weights it starts from; the number of completed updates."""
    entry = on_first_rank(lambda: _resumable(config, folder))
    if entry is not None:
        state = load_checkpoint(entry, chunks, optimizer, groups, config)
        return state.step
    if config.checkpoint.initialize_from is not None:
        source = Path(config.checkpoint.initialize_from)
        start = on_first_rank(lambda: _announced(checkpoint_at(source)))
        assert start is not None, "checkpoint_at raises where there is none"
        load_weights(start, chunks, optimizer, groups, config)
    return 0


def _resumable(config: Config, folder: RunFolder) -> CheckpointEntry | None:
    entry = _announced(newest_good(folder.checkpoints))
    if entry is not None and config.checkpoint.resume == "never":
        raise RunFolderError(
            f"checkpoint.resume=never, but {folder.path} holds a checkpoint of step {entry.step}; set another run.dir "
            "or checkpoint.resume=auto"
        )
    return entry


def _announced(newest: Newest) -> CheckpointEntry | None:
    """Tells the user of every checkpoint that was passed over, and which one is taken."""
    for warning in newest.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if newest.entry is not None:
        print(f"loading {newest.entry.path}", flush=True)
    return newest.entry
