"""Exports beside training: checkpoints that a run has just published, as folders that Hugging Face's libraries load.

A checkpoint is the sharded state that all ranks wrote together. The first rank turns its files into a folder in a
thread, one tensor at a time, straight from the page cache: no rank holds the model, nothing is sent, and no other rank
waits.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.background import started
from mtrain.checkpoint.directory import load_entry, published_steps, reading, step_name
from mtrain.convert.exporting import export_hf
from mtrain.errors import MachineError, MtrainError
from mtrain.run_folder import RunFolder

_NUM_WORKERS = 1
"""Files in work at once: training goes first."""


class _Export(NamedTuple):
    """A step whose checkpoint is kept from deletion until it is exported."""

    step: int
    held: contextlib.ExitStack


class Exporter:
    """The exports of one run, one after the other; of the first rank alone, and without collectives.

    A failed export is told of and training goes on; the next start tries again where the checkpoint is still there.
    """

    def __init__(self, folder: RunFolder, every_steps: int, check: Callable[[], None] = lambda: None) -> None:
        """Takes up what an earlier start of the run left to do.

        Args:
            folder: The run folder.
            every_steps: Multiples of this are exported; 0: nothing.
            check: Called before an export begins; raises where another run has taken the folder over.

        Raises:
            MachineError: The disk refuses.
        """
        self._folder, self._every, self._check = folder, every_steps, check
        self._expected: list[int] = []
        self._waiting: list[_Export] = []
        self._running: tuple[_Export, Future[None]] | None = None
        self._fault: MtrainError | None = None
        if every_steps > 0:
            for step in published_steps(folder.checkpoints):
                self.expect(step)

    def expect(self, step: int) -> None:
        """To be told of every checkpoint that is about to be published."""
        if self._every > 0 and step % self._every == 0 and not self._target(step).exists():
            self._expected.append(step)

    def poll(self) -> None:
        """Notes what was published, and begins the next export where none is running.

        To be called at every step boundary, between two saves once at least: what was noted is not deleted.
        """
        for step in [step for step in self._expected if self._checkpoint(step).exists()]:
            self._expected.remove(step)
            self._note(step)
        if self._running is not None and self._running[1].done():
            self._end(*self._running)
        if self._running is None and self._waiting:
            export = self._waiting.pop(0)
            self._running = export, started(lambda: self._run(export), f"export-{export.step}")

    def finish(self) -> None:
        """Waits until everything that was published is exported.

        Raises:
            MtrainError: The last export failed.
        """
        self.poll()
        while self._running is not None:
            self._running[1].exception()  # waits
            self.poll()
        if self._fault is not None:
            raise self._fault

    def _note(self, step: int) -> None:
        held = contextlib.ExitStack()
        try:
            held.enter_context(reading(load_entry(self._checkpoint(step))))
        except MtrainError as fault:
            self._fail(step, fault)
        else:
            self._waiting.append(_Export(step, held))

    def _run(self, export: _Export) -> None:
        """In a thread."""
        self._check()
        export_hf(self._checkpoint(export.step), self._target(export.step), None, None, _NUM_WORKERS)

    def _end(self, export: _Export, work: Future[None]) -> None:
        self._running, self._fault = None, None
        export.held.close()
        fault, target = work.exception(), self._target(export.step)
        if fault is None:
            print(f"exported {target}", flush=True)
            return
        shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)  # a full disk needs the room
        self._fail(export.step, fault if isinstance(fault, MtrainError) else MachineError(repr(fault)))

    def _fail(self, step: int, fault: MtrainError) -> None:
        self._fault = type(fault)(f"step {step} is not exported: {fault}")
        print(f"warning: {self._fault}; training goes on", file=sys.stderr, flush=True)

    def _checkpoint(self, step: int) -> Path:
        return self._folder.checkpoints / step_name(step)

    def _target(self, step: int) -> Path:
        return self._folder.exports / step_name(step)
