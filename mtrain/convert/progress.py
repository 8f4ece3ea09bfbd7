"""Progress of a conversion: a bar with GB/s on a terminal; elsewhere, and during training, a line now and then."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0
_GB = 1e9


class Meter:
    """Counter of bytes, for use from any thread."""

    def __init__(self, title: str, total_bytes: int) -> None:
        """Args:
        Action that is shown.
        Number of bytes to process.
        """
        self._title, self._total_bytes = title, total_bytes
        self._lock = threading.Lock()
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}% {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or threading.current_thread() is not threading.main_thread(),
        )
        self._task = self._bar.add_task(title, total=max(total_bytes, 1), rate="")
        self.done_bytes = 0

    def __enter__(self) -> Self:
        self._start_s = self._reported_s = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            print(f"{self._title}: {self.done_bytes / _GB:.2f} GB in {self.seconds:.1f} s, {self.rate}", flush=True)

    @property
    def seconds(self) -> float:
        """Time since the start of the block."""
        return time.monotonic() - self._start_s

    @property
    def rate(self) -> str:
        """Average speed so far, as text in GB/s."""
        return f"{self.done_bytes / _GB / max(self.seconds, 1e-9):.2f} GB/s"

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are done."""
        with self._lock:
            self.done_bytes += num_bytes
            self._bar.update(self._task, completed=self.done_bytes, rate=self.rate)
            if self._bar.disable and time.monotonic() - self._reported_s > _SECONDS_BETWEEN_LINES:
                self._reported_s = time.monotonic()
                share = self.done_bytes / max(self._total_bytes, 1)
                print(f"{self._title}: {share:.0%}, {self.done_bytes / _GB:.1f} GB, {self.rate}", flush=True)
