"""Decides which checkpoints to keep, and deletes the others.

A checkpoint whose numbers are all finite can still be useless: weights of 1e30 are finite. So it counts as good only
once a later step, or a forward pass with the same weights, has given a finite loss. Until then it neither counts nor is
deleted, and no other checkpoint is deleted in its favour. Nothing on disk records this: a run deletes only checkpoints
older than one that it has confirmed itself, and its first step confirms the checkpoint that it resumes from.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from mtrain.base.background import started
from mtrain.base.errors import DataError, MtrainError
from mtrain.base.fault_points import fault_point
from mtrain.checkpoint.store.directory import delete_checkpoint, load_entry
from mtrain.checkpoint.store.manifest import Manifest
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config.schema.run import CheckpointSection

_log = logging.getLogger(__name__)


class Keep(NamedTuple):
    """Rules for keeping checkpoints; a checkpoint stays if any of them applies."""

    last: int
    """Number of newest checkpoints to keep; at least 1."""
    every: int | None = None
    """Interval in steps whose multiples are kept forever; None keeps none."""
    best: int = 0
    """Number of checkpoints to keep with the best value of each measure (valid.metric); among equals, the newest."""

    @classmethod
    def of(cls, section: CheckpointSection) -> Keep:
        return cls(section.keep_last, section.keep_every_steps, section.keep_best)


def to_delete(
    steps: Iterable[int],
    keep: Keep,
    valid_losses: Mapping[int, float] | None = None,
    measures: Mapping[int, str | None] | None = None,
) -> list[int]:
    """Returns the steps that may be deleted, ascending; only losses of the same measure compare, by default all."""
    assert keep.last > 0, "the newest checkpoint is never deleted"
    losses, measure_of = valid_losses or {}, measures or {}
    # ranks all steps, even the newest, so that a step kept for two reasons does not make room for another
    ranked: dict[str | None, list[int]] = {}
    for step in sorted(losses, key=lambda step: (losses[step], -step)):
        ranked.setdefault(measure_of.get(step), []).append(step)
    best = {step for same_measure in ranked.values() for step in same_measure[: keep.best]}
    older = sorted(set(steps))[: -keep.last]
    return [step for step in older if step not in best and (keep.every is None or step % keep.every != 0)]


def apply_retention(root: Path, keep: Keep, confirmed: int) -> list[int]:
    """Deletes old checkpoints, and returns their steps. Damaged and unconfirmed checkpoints neither count nor are
    deleted, so the newest good one always stays, and so does one that is being read."""
    good = {step: manifest for step, manifest in whole_steps(root).items() if step <= confirmed}
    costs = {step: cost for step, info in good.items() if (cost := _cost(info)) is not None}
    measures = {
        step: info.valid_measure if info.task_metric is None else info.task_metric.name for step, info in good.items()
    }
    return [step for step in to_delete(good, keep, costs, measures) if delete_checkpoint(root, step)]


def _cost(info: Manifest) -> float | None:
    """Returns a number that is lower for better checkpoints; None for a step without validation or metric."""
    if (metric := info.task_metric) is None:
        return info.valid_loss
    return -metric.value if metric.is_better_if_higher else metric.value


def whole_steps(root: Path) -> dict[int, Manifest]:
    """Returns step -> manifest of the undamaged checkpoints, ascending."""
    good: dict[int, Manifest] = {}
    for step in published_steps(root):
        try:
            good[step] = load_entry(root / step_name(step)).manifest
        except DataError:
            continue  # stays on disk, because people may recover something from it
    return good


def way_back(root: Path, confirmed: int) -> str:
    """Tells the user which step to go back to after a numeric error, and how."""
    steps = list(whole_steps(root))
    good = [step for step in steps if step <= confirmed]
    doubtful = ", ".join(str(root / step_name(step)) for step in steps if step > confirmed)
    if not good:
        none = "no good checkpoint is left to go back to"
        return f"{none}: no finite loss followed {doubtful}" if doubtful else none
    path = root / step_name(good[-1])
    if doubtful:
        return (
            f"go back to step {good[-1]} ({path}): move {doubtful} away, which no finite loss followed, and start again"
        )
    return f"go back to step {good[-1]}: the next start resumes from {path}"


class Retention:
    """Deletes old checkpoints in a thread, once a newer one is confirmed. Only on the first rank; no collectives."""

    def __init__(self, root: Path, keep: Keep, check: Callable[[], None] = lambda: None, start_step: int = 0) -> None:
        """
        Args:
            root: Folder `checkpoints` of the run, visible to all ranks.
            check: Called on the first rank before a checkpoint is published or deleted, and on any rank if a step is
                already saved; raises if another run has taken the folder over.
            start_step: Step of the checkpoint that the run has resumed from; 0 without one.
        """
        self.root, self._keep, self.check = root, keep, check
        self.confirmed = start_step - 1  # the loaded checkpoint followed the earlier ones
        # after a crash between publication and retention, the next start's first step catches up
        self._pending: int | None = start_step if start_step > 0 else None
        self._work: Future[None] | None = None

    def rewind(self, step: int) -> None:
        """Goes back to a good checkpoint; the run will replace newer ones."""
        self.confirmed, self._pending = step, None

    def doubtful(self, below: int) -> dict[int, str]:
        """Returns step -> reason, for published checkpoints that a run must not go back to after a numeric error.

        Checkpoints of step `below` and later are too new. If none is confirmed, as in the first step of a start, any
        earlier whole one has to do.
        """
        steps = list(whole_steps(self.root))
        limit = max((step for step in steps if step < below and step <= self.confirmed), default=below - 1)
        return {
            step: f"no finite loss followed, or it is not from before step {below}" for step in steps if step > limit
        }

    def note_published(self, step: int) -> None:
        """Notes a new checkpoint; older ones may be deleted once it is confirmed."""
        self._pending = step

    def poll(self) -> None:
        """Starts to delete old checkpoints if a newer one was confirmed."""
        if self._work is not None:
            if not self._work.done():
                return
            self._work.result()  # raises an unexpected error
        if self._pending is not None and self._pending <= self.confirmed:
            step, self._pending = self._pending, None
            self._work = started(lambda: self._delete(step), f"retention-{step}")

    def finish(self, timeout_s: float) -> None:
        """Deletes everything that is due; waits at most `timeout_s` seconds, and the next start deletes the rest."""
        self._wait(timeout_s)
        self.poll()
        self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> None:
        if self._work is not None:
            concurrent.futures.wait([self._work], timeout_s)

    def _delete(self, step: int) -> None:
        """Deletes in the thread; a run that has lost its folder finds out at its next save."""
        fault_point("retention", 0, step)
        try:
            self.check()
            apply_retention(self.root, self._keep, step)
        except MtrainError as fault:  # training can continue, and the next confirmed checkpoint tries again
            _log.warning(f"warning: {fault}")
        fault_point("end", 0, step)
