"""State of a file on disk, by which a later start knows that it has not changed."""

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
    """Returns whether a write after the file was read, by the clock, would have changed its state: file systems have
    coarse clocks, and a second change in the same tick would leave no trace."""
    return max(state["mtime_ns"], state["ctime_ns"]) < read_at_ns - _SETTLED_NS
