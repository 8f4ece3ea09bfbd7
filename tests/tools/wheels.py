"""Packages that tests read and that are not installed beside those of the suite: unpacked in a folder that stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

FOLDER = "MTRAIN_TEST_WHEELS"
"""Environment variable: where they are kept from session to session (tests/conftest.py)."""
TRANSFORMER_ENGINE = "transformer-engine==2.11.0"
"""The newest release that megatron-core 0.16.1 takes; 0.7 MB of pure Python, whose compiled part is a package apart."""


@cache
def unpacked(requirement: str) -> Path | None:
    """The folder of a wheel without its dependencies; pip brings it if it is not there. None where pip cannot."""
    parent = Path(os.environ[FOLDER])
    folder = parent / requirement
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as own:
        target = Path(own) / "package"
        options = ["--no-deps", "--only-binary=:all:", "--no-compile", "--disable-pip-version-check", "--retries=1"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, f"--target={target}", requirement]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        try:
            target.rename(folder)  # whole or not at all
        except OSError:  # another worker of this session was first
            assert folder.is_dir()
    return folder
