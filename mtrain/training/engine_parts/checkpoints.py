"""Saves and loads of a user's program; each is complete when it returns."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.checkpoint.store.steps import step_name
from mtrain.mcore.distributed.init import on_first_rank
from mtrain.mcore.engine.rank_model import RankModel
from mtrain.mcore.state.load import load_checkpoint, save_checkpoint
from mtrain.mcore.state.shards import non_finite_state
from mtrain.mcore.state.verified import opened_checkpoint
from mtrain.runs.folder import RunFolder
from mtrain.training.resume import announced, say
from mtrain.training.run_folder import claim


class Position(NamedTuple):
    """Progress of a program."""

    step: int
    """Number of optimizer updates completed."""
    tokens: int
    """Number of tokens that these updates have read."""


def save_at(folder: RunFolder, at: Position, model: RankModel) -> Path:
    """Saves a checkpoint, and returns its path when it is published. Collective over the world.

    Raises:
        RunFolderError: The folder holds this step already or a run of another configuration, or is in use.
        MachineError: The disk refuses.
        NumericError: A weight is not finite; nothing was saved.
    """
    with contextlib.ExitStack() as held:
        # the lock is held during the save only: a program may save into several folders
        on_first_rank(lambda: claim(folder, model.config, held).config)
        save_checkpoint(folder.checkpoints, model, at.step, at.tokens)
    return folder.checkpoints / step_name(at.step)


def load_from(path: Path, model: RankModel) -> Position:
    """Loads weights and optimizer of a checkpoint, or of the newest good one of a run. Collective over the world.

    Raises:
        DataError: The checkpoint is damaged, of another model, or holds nan or inf; the model must not be used then.
    """
    with opened_checkpoint(lambda unusable: checkpoint_at(path, unusable), say) as newest:
        entry = announced(newest)
        assert entry is not None, "checkpoint_at raises where there is none"
        state = load_checkpoint(entry, model)
        found = Position(state.step, on_first_rank(lambda: entry.manifest.tokens))
    if (fault := non_finite_state(model)) is not None:
        error = DataError(f"{path} cannot be trained from: {fault}; load another checkpoint")
        error.on_every_rank = True
        raise error
    return found
