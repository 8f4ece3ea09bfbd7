"""Exports during training: converts published checkpoints to folders that Hugging Face's libraries can load.

The first rank converts the files of a checkpoint in a thread, one tensor at a time, straight from the page cache: no
rank holds the whole model, nothing is sent, and no other rank waits.

An export is due while its checkpoint exists and its folder does not; nothing else records it. So a run that stops or
dies leaves its exports to the next start.
"""

import concurrent.futures
import contextlib
import functools
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from mtrain.base.background import started
from mtrain.base.errors import ConfigError, MachineError, MtrainError
from mtrain.base.fault_points import fault_point
from mtrain.base.files import disk_faults, remove
from mtrain.checkpoint.store.directory import load_entry, reading
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.convert.exporting import export_hf
from mtrain.convert.work import staging_folder, staging_folders
from mtrain.core.ranks.init import on_first_rank
from mtrain.runs.folder import RunFolder

_log = logging.getLogger(__name__)

_NUM_WORKERS = 1
"""Number of files that are converted at once; with one, the exporter's own thread does the work."""
_POLL_S = 0.1
_STEP = re.compile(r"step_(\d+)")
_PATIENCE_S = 2.0
"""Seconds that the end of a run waits for an export to stop, which may hang on a dead disk."""


class _StoppedError(Exception):
    """Export that stops because the run ends; never leaves this module."""


def due_steps(folder: RunFolder, every_steps: int) -> list[int]:
    """Returns the steps whose checkpoints exist but are not exported yet, ascending; none if `every_steps` is 0."""
    steps = published_steps(folder.checkpoints) if every_steps > 0 else []
    return [step for step in steps if step % every_steps == 0 and not _target(folder, step).exists()]


def clean_staging(folder: RunFolder, every_steps: int) -> None:
    """Deletes unfinished exports that are no longer due, at the start of a run that holds the folder's lock."""
    due = {staging_folder(_target(folder, step)) for step in due_steps(folder, every_steps)}
    with disk_faults(f"clean {folder.exports}"):
        for path in staging_folders(folder.exports):
            if path not in due:
                remove(path)


class Exporter:
    """Exports of one run, one after the other, on the first rank alone and without collectives.

    A failed export is reported and training continues; the next start retries if the checkpoint still exists.
    """

    def __init__(self, folder: RunFolder, every_steps: int, check: Callable[[], None] = lambda: None) -> None:
        """Queues the exports that an earlier start of the run has left.

        Args:
            every_steps: Interval of the exported steps; 0: none.
            check: Called before an export begins; raises if another run has taken over the folder.
        """
        self._folder, self._every, self._check = folder, every_steps, check
        self._expected: list[int] = []
        self._protected: dict[int, contextlib.ExitStack] = {}
        """Steps to export, with the locks that protect their checkpoints from deletion."""
        self._waiting: list[int] = []
        self._running: tuple[int, Future[None]] | None = None
        self._fault: MtrainError | None = None
        self._is_stopped = threading.Event()
        self._forgotten: set[int] = set()
        for step in due_steps(folder, every_steps):  # before a save of this start can delete their checkpoints
            self._note(step)

    def expect(self, step: int) -> None:
        """Notes a checkpoint that is about to be published; must be called for each."""
        if self._every > 0 and step % self._every == 0 and not _target(self._folder, step).exists():
            # the folder appears some steps later; `poll` looks for it
            self._expected.append(step)

    def poll(self) -> None:
        """Notes published checkpoints, and begins the next export if none is running.

        Must be called at least once between two saves, at a step boundary: a noted checkpoint is not deleted.
        """
        for step in [step for step in self._expected if self._checkpoint(step).exists()]:
            self._expected.remove(step)
            self._note(step)
        if self._running is not None and self._running[1].done():
            self._end(*self._running)
        if self._running is None and self._waiting and not self._is_stopped.is_set():
            step = self._waiting.pop(0)
            self._running = step, started(functools.partial(self._run, step), f"export-{step}")

    def rewind(self, step: int) -> None:
        """Deletes the exports of steps after `step`, to which the run rolls back."""
        if self._every == 0:
            return
        self._expected = [number for number in self._expected if number <= step]
        if self._running is not None and self._running[0] > step:
            self._forgotten.add(self._running[0])
            concurrent.futures.wait([self._running[1]])
            self._end(*self._running)
            self._forgotten.clear()
        for number in [number for number in self._waiting if number > step]:
            self._waiting.remove(number)
            self._protected.pop(number).close()
        with disk_faults(f"clean {self._folder.exports}"):
            # also unfinished ones, which the next export of the step would continue
            for path in [*self._folder.exports.glob("step_*"), *staging_folders(self._folder.exports)]:
                if (match := _STEP.search(path.name)) is not None and int(match[1]) > step:
                    remove(path)

    def stop(self) -> None:
        """Begins no further export and asks a running one to end; does not wait."""
        self._is_stopped.set()

    def finish(self, is_stopped: Callable[[], bool] = lambda: False) -> list[int]:
        """Waits until all exports that are due are finished, or until `is_stopped` returns true.

        Returns:
            Steps that are left to the next start; empty unless the run was stopped.

        Raises:
            MtrainError: The last export failed.
        """
        self.poll()
        while self._running is not None:
            if is_stopped():
                self.stop()
            if self._is_stopped.is_set():
                break
            concurrent.futures.wait([self._running[1]], _POLL_S)
            self.poll()
        if self._is_stopped.is_set():
            return due_steps(self._folder, self._every)
        if self._fault is not None:
            raise self._fault
        return []

    def close(self) -> None:
        """Leaves the remaining exports to the next start, however the run ends; abandons an export that hangs."""
        self.stop()
        if self._running is not None and concurrent.futures.wait([self._running[1]], _PATIENCE_S).done:
            self._end(*self._running)
        for protection in self._protected.values():
            protection.close()
        self._protected.clear()
        with contextlib.suppress(MtrainError):  # the next start reports the fault of the disk
            if due := due_steps(self._folder, self._every):
                _log.info(f"exports left to the next start: {', '.join(map(step_name, due))}")

    def _note(self, step: int) -> None:
        protection = contextlib.ExitStack()
        try:
            # locks the checkpoint, so that retention keeps it until it is exported
            protection.enter_context(reading(load_entry(self._checkpoint(step))))
        except MtrainError as fault:
            self._fail(step, fault)
        else:
            self._protected[step] = protection
            self._waiting.append(step)

    def _run(self, step: int) -> None:
        """Exports one checkpoint, in the exporter's thread."""
        self._check()

        def go_on() -> None:
            fault_point("export.piece", 0, step)
            if self._is_stopped.is_set() or step in self._forgotten:
                raise _StoppedError

        export_hf(self._checkpoint(step), _target(self._folder, step), None, None, _NUM_WORKERS, go_on)

    def _end(self, step: int, work: Future[None]) -> None:
        self._running, self._fault = None, None
        fault, target = work.exception(), _target(self._folder, step)
        if isinstance(fault, _StoppedError):
            self._waiting.append(step)
            return
        self._protected.pop(step).close()
        if fault is None:
            _log.info(f"exported {target}")
            return
        with contextlib.suppress(OSError):  # otherwise the next start deletes it
            remove(staging_folder(target))
        self._fail(step, fault if isinstance(fault, MtrainError) else MachineError(repr(fault)))

    def _fail(self, step: int, fault: MtrainError) -> None:
        self._fault = type(fault)(f"step {step} is not exported: {fault}")
        _log.warning(f"warning: {self._fault}; training continues")

    def _checkpoint(self, step: int) -> Path:
        return self._folder.checkpoints / step_name(step)


def _target(folder: RunFolder, step: int) -> Path:
    return folder.exports / step_name(step)


def export_whole(checkpoint: Path, out: Path) -> None:
    """Converts a whole model in one thread, one tensor at a time; each is read back and compared."""
    export_hf(checkpoint, out, like=None, dtype=None, num_workers=1)


def exported_through_checkpoint(
    out: Path, save: Callable[[Path], Path], convert: Callable[[Path, Path], object] = export_whole
) -> None:
    """Saves a checkpoint into a scratch folder, converts it, and deletes it. Collective over the world."""
    scratch = out.parent / f".{out.name}.checkpoint"

    def begin() -> None:
        if out.exists():
            raise ConfigError(f"{out} exists and is not overwritten; name another folder or move it away")
        end()  # deletes what a dead export has left

    def end() -> None:
        with disk_faults(f"delete {scratch}"):
            if scratch.exists():
                remove(scratch)

    on_first_rank(begin)
    try:
        checkpoint = save(scratch)
        on_first_rank(lambda: convert(checkpoint, out))
    finally:
        on_first_rank(end)
