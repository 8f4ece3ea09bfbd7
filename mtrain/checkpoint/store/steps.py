"""Names of checkpoint folders; imports little, so that listing checkpoints is fast."""

import re
from pathlib import Path

from mtrain.base.files import disk_faults

STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def published_steps(root: Path) -> list[int]:
    """Returns the steps that have a folder, ascending; does not check the folders."""
    with disk_faults(f"list {root}"):
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.exists() else []
    matches = (STEP_FOLDER.fullmatch(name) for name in names)
    # only canonical names, because step_000000010 would be a second folder for step 10
    return sorted(int(match[1]) for match in matches if match and step_name(int(match[1])) == match[0])
