"""Keeps the machine busy while tests wait: one worker more than cores, and a core for each test that computes.

Tests marked `waits` spend their time in timeouts and suspensions. They run at once; every other test first takes one of
as many locks as this process may use cores. So a waiting test keeps no core from the rest, and the rest does not
share cores, which would cost more than it brings.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

_POLL_S = 0.005


class Cores:
    """Plugin of a worker of pytest-xdist."""

    def __init__(self, run_id: str) -> None:
        """Opens the locks that the workers of one run share.

        Args:
            run_id: Name of the run that all its workers know.
        """
        self._folder = Path(tempfile.gettempdir(), f"mtrain-cores-{run_id}")
        self._folder.mkdir(exist_ok=True)
        self._locks = [(self._folder / str(core)).open("w") for core in range(len(os.sched_getaffinity(0)))]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Runs a test that computes while it holds a core."""
        if item.get_closest_marker("waits") is not None:
            return (yield)
        while not any(self._is_taken(lock.fileno()) for lock in self._locks):
            time.sleep(_POLL_S)
        try:
            return (yield)
        finally:
            for lock in self._locks:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        """Removes the locks; workers that still run have opened them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _is_taken(descriptor: int) -> bool:
        """Says whether this process has the lock now."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
