"""State of a file on disk, which tells a later start whether the file has changed."""

import os
from pathlib import Path

from mtrain.base.errors import DataError

_SETTLED_NS = 10 * 10**9
"""Longer than the tick of any file system in use (2 s at most) and than the clock skew between nodes."""


def state_of(path: Path) -> dict[str, int]:
    """Returns properties that change with every write to a file."""
    try:
        stat = os.stat(path)
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}; check the path") from fault
    times = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    return {"bytes": stat.st_size, "inode": stat.st_ino, **times}


def is_settled(state: dict[str, int], read_at_ns: int) -> bool:
    """Says whether every write after the file was read would change its state. File systems have coarse clocks, so a
    second write in the same tick leaves no trace."""
    return max(state["mtime_ns"], state["ctime_ns"]) < read_at_ns - _SETTLED_NS
