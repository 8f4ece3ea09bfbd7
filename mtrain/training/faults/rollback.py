"""Rollback to a good checkpoint in the same process, to go on without the bad batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mtrain.base.errors import DataError, NumericError, SpoiledStateError
from mtrain.checkpoint.state.save import Saver
from mtrain.checkpoint.store.directory import delete_checkpoint, set_aside
from mtrain.core.ranks.init import on_first_rank
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run
from mtrain.training.export import Exporter
from mtrain.training.faults.guard import Guard
from mtrain.training.faults.trial import RollBackError
from mtrain.training.resume import load_newest

_log = logging.getLogger(__name__)


def as_rollback(error: RollBackError | SpoiledStateError, guard: Guard, step: int) -> RollBackError:
    """Returns the rollback that a step asks for, or that follows from a spoiled state found by a save.

    Args:
        step: Last step made, counted from 1.

    Raises:
        NumericError: The run ends.
    """
    if isinstance(error, RollBackError):
        return error
    guard.refuse(step, error)  # raises unless the action is rollback: skipping repairs no state
    return RollBackError(step, str(error))


def roll_back(
    run: Run, folder: RunFolder, saver: Saver, exporter: Exporter, guard: Guard, wanted: RollBackError
) -> Run:
    """Loads the newest good checkpoint from before the bad step of `wanted`. Collective over the world.

    Later checkpoints and exports are deleted: their steps will be made again, without the bad batch.

    Returns:
        Run that starts from the checkpoint.

    Raises:
        NumericError: There is no such checkpoint.
    """
    if run.model.groups.rank == 0:
        _log.info(f"rolling back: {wanted}")
    below = guard.first_left_out_for(wanted.step)
    too_new = saver.doubtful(below)
    try:
        found = load_newest(run.model, folder, run.loader, run.inputs, passed_over=too_new)
    except DataError as error:
        raise NumericError(f"{wanted}; there is no checkpoint to roll back to: {error}") from error
    if found is None:
        raise NumericError(
            f"{wanted}; there is no checkpoint of a step before {below} to roll back to: set checkpoint.interval_steps"
        )
    on_first_rank(lambda: _remove(folder.checkpoints, too_new))
    saver.rewind(found.step, found.changes)
    exporter.rewind(found.step)
    guard.rewind(found.history)
    return replace(run, start_step=found.step, changes=found.changes, history=guard.history)


def _remove(checkpoints: Path, steps: Iterable[int]) -> None:
    for step in steps:
        if not delete_checkpoint(checkpoints, step):
            set_aside(checkpoints, step)  # another process is reading it
