"""Names of checkpoint folders; needs nothing else, so that they are listed in no time."""

from __future__ import annotations

import re
from pathlib import Path

from mtrain.base.files import disk_faults

STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step_{step:08d}"


def published_steps(root: Path) -> list[int]:
    """Steps that have a folder, ascending; whether it is good is not looked at."""
    with disk_faults(f"list {root}"):
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
    matches = (STEP_FOLDER.fullmatch(name) for name in names)
    # the canonical name only: step_000000010 would be a second folder for step 10
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])
