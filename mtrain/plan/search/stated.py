"""The machine that a configuration states in a comment; `written` writes such a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mtrain.base.files import disk_faults

_GIB = 2**30
_MACHINE = re.compile(r"^# GPUs: (\d+) x (\w+) (\d+(?:\.\d+)?) ?Gi?B\b", re.MULTILINE)
"""Pattern of the line that states the machine; GB of a GPU are GiB, as its maker writes them."""
_HEAD_BYTES = 4096


class StatedMachine(NamedTuple):
    """Machine that a configuration states, in a line such as `# GPUs: 64 x h100 80 GiB`."""

    num_gpus: int
    memory_bytes: int
    gpu: str


def stated_machine(paths: Iterable[Path]) -> StatedMachine | None:
    """Reads the machine that the files state, the last one of several; None where no file states one."""
    found = None
    for path in paths:
        if path.is_file():
            with disk_faults(f"read {path}"), path.open("rb") as file:
                match = _MACHINE.search(file.read(_HEAD_BYTES).decode(errors="replace"))
            if match is not None:
                found = StatedMachine(int(match[1]), int(float(match[3]) * _GIB), match[2])
    return found
