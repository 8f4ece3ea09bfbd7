"""Warnings as errors in ranks and commands too: they are forked from a process that has imported this module.

The list is the one of pytest, in pyproject.toml; `tests/pool.py` has it imported last.
"""

from __future__ import annotations

import tomllib
import warnings

from _pytest.config import parse_warning_filter

from tests.paths import ROOT


def install() -> None:
    """Turns warnings into errors from here on, except those that pyproject.toml names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    for line in settings["filterwarnings"]:
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


install()
