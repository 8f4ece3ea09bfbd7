"""What every rank does in a test of faults while saving; the functions for `Pool.run`."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mtrain.base import fault_points
from mtrain.base.errors import MtrainError
from mtrain.checkpoint.state.load import load_checkpoint
from mtrain.checkpoint.state.save import PendingSave, Saver
from mtrain.checkpoint.state.verified import opened_checkpoint
from mtrain.checkpoint.store.directory import newest_good
from mtrain.checkpoint.store.retention import Keep, Retention
from mtrain.checkpoint.store.steps import published_steps
from mtrain.config import Config
from mtrain.core.ranks.groups import Groups
from mtrain.data.loader import StepLoader
from mtrain.runs.folder import RunFolder
from tests.checkpoint.checkpoints import save
from tests.core.state.checkpoint_ranks import Parts, build, in_few_passes

_LIMIT_S = 3600.0
"""Time limit of a save."""


class Ending(NamedTuple):
    """How a rank's steps and saves ended."""

    steps: int
    """Number of training steps made."""
    error: tuple[str, str]
    """Class and text of the error; ("nothing", "") where none was raised."""
    seconds: float
    warnings: list[str]
    """Lines for the user."""


def train_and_save(
    groups: Groups,
    config: Config,
    folder: Path,
    saves: list[int],
    fault: str | None,
    num_steps: int = 4,
    first: int = 0,
) -> Ending:
    """Trains from step `first` on and saves after the steps in `saves`; a fault strikes once."""
    if fault is not None:
        os.environ[fault_points.VARIABLE] = fault
    config = in_few_passes(config, groups)
    parts, steps = build(groups, config), range(first, num_steps)
    saver = Saver(parts.model, Retention(folder, Keep.of(config.checkpoint)))
    return _ending(lambda count: _train(groups, config, parts, saver, saves, steps, count))


def save_once(groups: Groups, config: Config, folder: Path) -> list[int]:
    """Saves after one step; returns the steps that are published when `save` returns."""
    parts = build(groups, config)
    saver = Saver(parts.model, Retention(folder, Keep.of(config.checkpoint)))
    saver.save(1)
    found = published_steps(folder)
    saver.finish()
    return found


_OTHER = "process 1 on another-node [c0ffee]\n"


def lose_the_folder(groups: Groups, config: Config, run: Path, has_saved: bool) -> Ending:
    """Lets another run write its name into the lock file, during a save of this one or before it; `has_saved`: the
    other run has saved the step as well."""
    folder = RunFolder(run)
    folder.create()
    parts = build(groups, config)
    with folder.locked() as lock:
        saver = Saver(parts.model, Retention(folder.checkpoints, Keep.of(config.checkpoint), lock.check))

        def work(count: Callable[[], None]) -> None:
            saver.save(1)
            saver.wait()
            count()
            if has_saved:
                save(folder.checkpoints, 2)
                folder.lock_file.write_text(_OTHER)
            saver.save(2)
            if not has_saved:  # written once: the save under way would read a file that is empty for an instant
                folder.lock_file.write_text(_OTHER)
            saver.finish()

        return _ending(work)


def resume_or_initialize(groups: Groups, config: Config, folder: Path) -> tuple[int, list[str], tuple[str, str]]:
    """Returns the step of the checkpoint that was verified and loaded (0: none), the warnings, and the error."""
    parts, found = build(groups, config), (0, list[str]())
    try:
        with opened_checkpoint(lambda unusable: newest_good(folder, unusable), lambda text: None) as newest:
            if newest.entry is not None:
                state = load_checkpoint(newest.entry, parts.model)
                found = (state.step, list(newest.warnings))
    except MtrainError as error:
        return (*found, (type(error).__name__, str(error)))
    return (*found, ("nothing", ""))


def _train(
    groups: Groups,
    config: Config,
    parts: Parts,
    saver: Saver,
    saves: list[int],
    steps: range,
    count: Callable[[], None],
) -> None:
    loader = StepLoader(config, groups.dp_rank, groups.layout.dp)
    for step in steps:
        totals = parts.training.forward_backward(loader.batches(step) if groups.tp_rank == 0 else None)
        parts.training.update(totals, config.optimizer.lr)
        saver.confirm(step)
        saver.poll()
        count()
        if step + 1 == steps.stop:
            saver.confirm(steps.stop)  # the trainer does so after a forward pass
        if step + 1 in saves:
            saver.save(step + 1)
    saver.finish()


def _ending(work: Callable[[Callable[[], None]], Any]) -> Ending:
    began, steps = time.monotonic(), 0

    def count() -> None:
        nonlocal steps
        steps += 1

    error = ("nothing", "")
    with contextlib.redirect_stderr(io.StringIO()) as reported:
        try:
            work(count)
        except MtrainError as fault:
            error = (type(fault).__name__, str(fault))
    return Ending(steps, error, time.monotonic() - began, reported.getvalue().splitlines())


def answers(groups: Groups, busy_polls: list[int]) -> tuple[list[bool], list[bool]]:
    """Polls a save during which rank r is busy for some polls; returns all answers, and those of asking and waiting.

    Every rank polls only when the one before it has gone on from its own poll.

    Args:
        groups: The process groups.
        busy_polls: Number of polls during which the save of each rank is busy.
    """
    store, rank = dist.distributed_c10d._get_default_store(), groups.rank
    work: Future[Any] = Future()
    facts: Any = None
    flight = PendingSave(facts, facts, facts, work, time.monotonic())
    found = []
    for poll in range(max(busy_polls) + 3):
        if poll == busy_polls[rank]:
            work.set_result(None)
        if rank > 0:
            store.wait([f"pending/{poll}/{rank - 1}"], timedelta(minutes=5))
        found.append(flight.was_ready(_LIMIT_S, groups.device))
        store.set(f"pending/{poll}/{rank}", "passed")
    late = PendingSave(facts, facts, facts, Future(), time.monotonic())
    now = [late.was_ready(_LIMIT_S, groups.device), late.is_ready(_LIMIT_S, groups.device)]
    if rank == 0:
        late.work.set_result(None)
    now.append(late.is_ready(_LIMIT_S, groups.device))
    if rank > 0:
        late.work.set_result(None)
    return found, [*now, late.is_ready(_LIMIT_S, groups.device)]
