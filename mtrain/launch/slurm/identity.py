"""One name for a folder, by whatever path it is reached: links and bind mounts are followed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")


class _Mount(NamedTuple):
    device: str
    """Number of the device of the file system."""
    root: Path
    """Folder of the file system that is mounted; not / for a bind mount of a folder."""
    point: Path
    """Folder at which it is mounted."""


def main_path(folder: Path, mounts: str | None = None) -> Path:
    """Returns the path of the folder without links, by the mount that shows most of its file system.

    Args:
        folder: Any path of the folder, which need not exist yet.
        mounts: Text in the form of /proc/self/mountinfo; None reads that file.
    """
    path = folder.resolve()
    if mounts is None:
        with suppress(OSError):
            mounts = _MOUNTS.read_text(errors="surrogateescape")
    known = [_mount(line) for line in (mounts or "").splitlines()]
    over = [mount for mount in known if path.is_relative_to(mount.point)]
    if not over:
        return path
    longest = max(len(mount.point.parts) for mount in over)
    own = [mount for mount in over if len(mount.point.parts) == longest][-1]  # a later mount hides an earlier one
    inside = own.root / path.relative_to(own.point)
    same = [mount for mount in known if mount.device == own.device and inside.is_relative_to(mount.root)]
    main = min(same, key=lambda mount: len(mount.root.parts))  # the first of those that show as much
    return main.point / inside.relative_to(main.root)


def _mount(line: str) -> _Mount:
    fields = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), field) for field in line.split(" ")]
    return _Mount(fields[2], Path(fields[3]), Path(fields[4]))
