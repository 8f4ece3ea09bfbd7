"""The machine that a configuration says it is for; `written` writes such a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mtrain.base.files import disk_faults

_GIB = 2**30
_MACHINE = re.compile(r"^# GPUs: (\d+) x (\w+) (\d+(?:\.\d+)?) ?Gi?B\b", re.MULTILINE)
"""GB of a GPU are GiB, as its maker writes them."""
_HEAD_BYTES = 4096


class StatedMachine(NamedTuple):
    """What a configuration says that it is for, in a line such as `# GPUs: 64 x h100 80 GiB`."""

    num_gpus: int
    memory_bytes: int
    gpu: str


def stated_machine(paths: Iterable[Path]) -> StatedMachine | None:
    """What the files say that they are for; of several the last one that says so. None where none does."""
    found = None
    for path in paths:
        if path.is_file():
            with disk_faults(f"read {path}"), path.open("rb") as file:
                match = _MACHINE.search(file.read(_HEAD_BYTES).decode(errors="replace"))
            if match is not None:
                found = StatedMachine(int(match[1]), int(float(match[3]) * _GIB), match[2])
    return found
