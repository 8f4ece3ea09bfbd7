"""Checks a run as far as a login node can: without torch, before anything waits in a queue."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.config.renamed import RenamedKeyWarning
from mtrain.config.schema.root import Config
from mtrain.hf.configuration import load_config
from mtrain.hf.schema.registry import refuse_unexportable


def checked_config(paths: Sequence[Path], overrides: Sequence[str], num_ranks: int) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RenamedKeyWarning)  # rank 0 reports them when it runs
        config = load_config(paths, overrides)
    Layout.from_config(config, num_ranks)
    refuse_unexportable(config)
    return config


def check_at_least(least: int, **options: int | None) -> None:
    """Refuses an option below `least`; `gpus_per_node=` stands for --gpus-per-node, and None for one left out."""
    for name, number in options.items():
        if number is not None and number < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}, but must be at least {least}; change it")


def check_printable(option: str, text: str | None) -> None:
    """Refuses text that would break a line of a script."""
    if text is not None and not text.isprintable():
        raise ConfigError(f"{option} is {text!r}, which contains a control character; remove it")
