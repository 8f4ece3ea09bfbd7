"""Back to a good checkpoint in the same process, and on without what was bad."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mtrain.base.errors import DataError, NumericError, SpoiledStateError
from mtrain.checkpoint.store.directory import delete_checkpoint, set_aside
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.state.save import Saver
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run
from mtrain.training.export import Exporter
from mtrain.training.faults.attempt import RollBackError
from mtrain.training.faults.guard import Guard
from mtrain.training.resume import load_newest, say


def as_rollback(error: RollBackError | SpoiledStateError, guard: Guard, step: int) -> RollBackError:
    """What a step asks for; or what follows from a spoiled state that a save has found.

    Args:
        error: Either.
        guard: Decides about the latter.
        step: The last one made, counted from 1.

    Raises:
        NumericError: The run ends.
    """
    if isinstance(error, RollBackError):
        return error
    guard.refuse(step, error)  # raises, but where it says rollback: skipping repairs no state
    return RollBackError(step, str(error))


def roll_back(
    run: Run, folder: RunFolder, saver: Saver, exporter: Exporter, guard: Guard, wanted: RollBackError
) -> Run:
    """Loads the newest good checkpoint from before the bad step. Collective over the world.

    What was published since is deleted: its steps will be made anew, without the bad batch.

    Args:
        run: The run, whose weights, optimizer, counters and random states are loaded.
        folder: Its folder.
        saver: Its saves.
        exporter: Its exports.
        guard: Knows what is left out.
        wanted: Why.

    Returns:
        The run as it starts from there.

    Raises:
        NumericError: There is no such checkpoint.
    """
    if run.model.groups.rank == 0:
        say(f"rolling back: {wanted}")
    below = guard.first_left_out_for(wanted.step)
    too_new = saver.doubtful(below)
    try:
        found = load_newest(run.model, folder, run.loader, passed_over=too_new)
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
            set_aside(checkpoints, step)  # somebody reads it
