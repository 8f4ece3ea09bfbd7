"""What every rank does in a test of numeric faults: the real trainer, to its end or to its error."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import NamedTuple

import torch

from mtrain.base import fault_points
from mtrain.base.errors import MtrainError
from mtrain.base.signals import StopSignal
from mtrain.checkpoint.format.writer import write_metadata, write_shards
from mtrain.checkpoint.store.directory import publish
from mtrain.checkpoint.store.manifest import CheckpointInfo, TrainingState, write_state
from mtrain.config import Config
from mtrain.core.engine.training_state import local_shards
from mtrain.core.ranks.groups import Groups
from mtrain.training.build import build_run
from mtrain.training.trainer import Build, train_on
from tests.checkpoint.checkpoints import begin_staging
from tests.core.state.checkpoint_ranks import build


class Ending(NamedTuple):
    """How a start of a run ended on this rank."""

    exit_code: int
    message: str
    """Message of the error; empty where there was none."""
    output: str
    """Output that this rank printed."""


def run(groups: Groups, config: Config, fault: str | None = None, build: Build = build_run) -> Ending:
    """Makes one start of the run; a fault strikes where it is named."""
    os.environ.pop(fault_points.VARIABLE, None)
    if fault is not None:
        os.environ[fault_points.VARIABLE] = fault
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            with StopSignal() as signal:
                train_on(groups, config, signal, build)
        except MtrainError as error:
            return Ending(error.exit_code, str(error), printed.getvalue())
    return Ending(0, "", printed.getvalue())


def publish_unchecked(groups: Groups, config: Config, step: int) -> None:
    """Publishes a checkpoint with NaN in it, as a program without checks would. On one rank."""
    built = build(groups, config)
    parts = local_shards(built.model)
    for part in parts:
        if part.key == "decoder.final_layernorm.weight":
            part.data.view(-1)[0] = torch.nan
    staging = begin_staging(Path(config.run.dir) / "checkpoints", step)
    written = write_shards(staging.path / "__0_0.distcp", parts)
    write_metadata(staging.path, written.tensors)
    batch_size, vocab_size = config.train.global_batch_size, config.model.vocab_size
    write_state(
        staging.path,
        TrainingState(
            step=step,
            consumed_samples=step * batch_size,
            adam_step=step,
            loss_scaler=None,
            layout=str(groups.layout),
            device="cpu",
            vocab_size=vocab_size,
        ),
    )
    publish(staging, CheckpointInfo(step=step, layout=str(groups.layout), config_hash="", versions={}))
