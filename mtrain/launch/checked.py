"""A run as far as a login node can check it: without torch, and before anything waits in a queue."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from mtrain.base.errors import ConfigError
from mtrain.config.load import load_config
from mtrain.config.renamed import RenamedKeyWarning
from mtrain.config.schema.root import Config
from mtrain.hf.schema.exportable import refuse_unexportable
from mtrain.plan.layout import Layout


def checked_config(paths: Sequence[Path], overrides: Sequence[str], num_ranks: int) -> Config:
    """The configuration of a run that is started elsewhere.

    Args:
        paths: Its files.
        overrides: Its single values, `section.key=value`.
        num_ranks: How many it gets.

    Raises:
        ConfigError: The configuration is wrong, or does not run on so many ranks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)  # rank 0 notes them when it runs
        config = load_config(paths, overrides)
    Layout.from_config(config, num_ranks)
    refuse_unexportable(config)
    return config


def check_printable(option: str, text: str | None) -> None:
    """Refuses what would break a line of a script.

    Raises:
        ConfigError: The text holds a control character.
    """
    if text is not None and not text.isprintable():
        raise ConfigError(f"{option} holds {text!r}, a control character; remove it")
