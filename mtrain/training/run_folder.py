"""Claims the run folder for a start, and writes its configuration there."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from mtrain.checkpoint.store.directory import clean_leftovers
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.data import SftSection
from mtrain.data.encoding.encoder import trained_templates
from mtrain.runs.continuation import kept_lines
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import RunLock
from mtrain.training.changed import going_on
from mtrain.training.export import clean_staging
from mtrain.training.resume import say


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
    # under the lock: any unfinished checkpoint that is there now belongs to a dead run
    clean_leftovers(folder.checkpoints)
    clean_staging(folder, config.checkpoint.export_hf_every_steps)
    # after cleaning up, which may have made room on a full disk
    folder.probe()
    given, config = config, going_on(folder, config)
    for line in kept_lines(given, config):
        say(line)
    folder.write_config(config_yaml(config))
    # now, as the template's file may be changed or gone when the run is exported
    folder.write_chat_templates(trained_templates(config.data) if isinstance(config.data, SftSection) else {})
    return Claimed(lock, config)
