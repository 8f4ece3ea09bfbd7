"""Packages that tests read and that the suite's environment does not have: unpacked in a folder that is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from mtrain.base.ground import MEGATRON_CORES, found_megatron

FOLDER = "MTRAIN_TEST_WHEELS"
"""Environment variable: folder where they are kept from session to session (tests/conftest.py)."""
_MEGATRON = found_megatron()
_IS_OLDER = _MEGATRON is not None and _MEGATRON.version == MEGATRON_CORES[0]
TRANSFORMER_ENGINE = f"transformer-engine=={'2.12.0' if _IS_OLDER else '2.20.2'}"
"""Newest release that is accepted with the megatron-core that is installed; 1 MB of pure Python, whose compiled part is
another package."""
TRANSFORMERS_4 = ("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2")
"""Last release of version 4, and its requirements that are older than the suite's own packages."""


@cache
def unpacked(requirement: str) -> Path | None:
    """Returns the folder of a wheel without its dependencies; pip downloads a missing one. None where pip cannot."""
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


def transformers_4() -> list[Path] | None:
    """Returns folders to import transformers 4 from, before all others; None where pip cannot download them."""
    found = [unpacked(each) for each in TRANSFORMERS_4]
    return [each for each in found if each is not None] if all(found) else None
