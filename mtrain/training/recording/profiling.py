"""Profile of chosen ranks during a few steps (`metrics.profile_steps`), operation by operation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mtrain.base.files import write_atomically
from mtrain.config.schema.run import MetricsSection

_log = logging.getLogger(__name__)

_MAX_ROWS = 50
_MAX_MEMORY_EVENTS = 100_000


class StepProfiler:
    """Profiles the steps of one rank."""

    def __init__(self, metrics: MetricsSection, folder: Path, rank: int, device: torch.device) -> None:
        steps = metrics.profile_steps if rank in metrics.profile_ranks else ()
        self._first, self._last = steps if steps else (0, -1)
        self._folder, self._rank, self._device = folder, rank, device
        self._running: profile | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles a step, counted from 1, inside the `with` block; the last chosen step writes the files."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._running is None:
            self._start()
        yield
        if number == self._last:
            self._finish()

    def _start(self) -> None:
        is_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]
        self._running = profile(activities=activities, profile_memory=True, record_shapes=True)
        self._running.start()
        if is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)

    def close(self) -> None:
        """Writes the profile of steps that a stop has cut off."""
        if self._running is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._running is not None
        found, self._running = self._running, None
        found.stop()
        is_cuda = self._device.type == "cuda"
        try:
            self._write(found, is_cuda)
        except (OSError, RuntimeError) as fault:  # a full disk costs the profile alone
            _log.warning(f"warning: could not write the profile to {self._folder}: {fault}")
        finally:
            if is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, found: profile, is_cuda: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._folder / f"rank_{self._rank:05d}.steps_{self._first}_to_{self._last}"
        found.export_chrome_trace(f"{name}.trace.json.gz")
        order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=order, row_limit=_MAX_ROWS, max_name_column_width=100)
        write_atomically(Path(f"{name}.kernels.txt"), table + "\n")
        if is_cuda:
            memory: Any = torch.cuda.memory  # without types there
            memory._dump_snapshot(f"{name}.memory.pickle")
