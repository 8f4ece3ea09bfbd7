"""Claims the run folder for a start, and writes its configuration there; saves and loads for a user's program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.load import load_checkpoint, save_checkpoint
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import checkpoint_at, clean_leftovers, newest_good
from mtrain.checkpoint.store.steps import step_name
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.data import SftSection
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import non_finite_state
from mtrain.core.ranks.init import on_first_rank
from mtrain.data.encoding.encoder import trained_templates
from mtrain.runs.continuation import kept_lines
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import RunLock
from mtrain.training.changed import going_on
from mtrain.training.export import clean_staging
from mtrain.training.inputs import changed_inputs
from mtrain.training.resume import announced

_log = logging.getLogger(__name__)


class Claimed(NamedTuple):
    """Run folder that is locked for this process."""

    lock: RunLock
    config: Config
    """Configuration with the values that an earlier start decided."""


def claim(folder: RunFolder, config: Config, held: contextlib.ExitStack) -> Claimed:
    """Locks a run folder until `held` closes, and writes the resolved configuration and chat templates. On rank 0.

    Raises:
        RunFolderError: Another process works in the folder, or it holds a run of another configuration.
        DataError: A chat template is missing or damaged.
        MachineError: The folder cannot be written.
    """
    folder.create()
    lock = held.enter_context(folder.locked())
    # under the lock: an unfinished checkpoint belongs to a dead run
    clean_leftovers(folder.checkpoints)
    clean_staging(folder, config.checkpoint.export_hf_every_steps)
    folder.probe()  # after cleaning up, which may have made room
    given, config = config, going_on(folder, config)
    for line in kept_lines(given, config):
        _log.info(line)
    folder.write_config(config_yaml(config))
    # now, as the template's file may be changed or gone when the run is exported
    folder.write_chat_templates(trained_templates(config.data) if isinstance(config.data, SftSection) else {})
    return Claimed(lock, config)


class Position(NamedTuple):
    """Progress of a program."""

    step: int
    """Number of optimizer updates completed."""
    tokens: int
    """Number of tokens that these updates have read."""


def save_at(folder: RunFolder, at: Position, model: RankModel, inputs: Mapping[str, str]) -> Path:
    """Saves a checkpoint, and returns its path when it is published. Collective over the world.

    Raises:
        DataError: The newest checkpoint of the folder had other inputs.
        RunFolderError: The folder holds this step already or a run of another configuration, or is in use.
        MachineError: The disk refuses.
        NumericError: A weight is not finite; nothing was saved.
    """
    with contextlib.ExitStack() as held:
        # the lock is held during the save only: a program may save into several folders
        on_first_rank(lambda: claim(folder, model.config, held).config)
        on_first_rank(lambda: _check_newest(folder, inputs, model.config.checkpoint.allow_changed))
        save_checkpoint(folder.checkpoints, model, at.step, at.tokens, inputs)
    return folder.checkpoints / step_name(at.step)


def _check_newest(folder: RunFolder, inputs: Mapping[str, str], allow_changed: Sequence[str]) -> None:
    """Refuses to go on with a run by other inputs than those of its newest checkpoint."""
    try:
        newest = newest_good(folder.checkpoints).entry
    except DataError:
        return  # none of them is whole, and the save must come about all the same
    if newest is not None:
        changed_inputs(newest, inputs, allow_changed)


def load_from(path: Path, model: RankModel, inputs: Mapping[str, str]) -> Position:
    """Loads weights and optimizer of a checkpoint, or of the newest good one of a run. Collective over the world.

    Raises:
        DataError: The checkpoint had other inputs, and nothing was loaded; or it is damaged, of another model, or holds
            nan or inf; the model must not be used then.
    """
    with opened_checkpoint(lambda unusable: checkpoint_at(path, unusable), _log.info) as newest:
        entry = announced(newest)
        assert entry is not None, "checkpoint_at raises where there is none"
        on_first_rank(lambda: changed_inputs(entry, inputs, model.config.checkpoint.allow_changed))
        state = load_checkpoint(entry, model)
        found = Position(state.step, on_first_rank(lambda: entry.manifest.tokens))
    if (fault := non_finite_state(model)) is not None:
        error = DataError(f"{path} cannot be trained from: {fault}; load another checkpoint")
        error.on_every_rank = True
        raise error
    return found
