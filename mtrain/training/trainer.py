"""Training loop of a run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from typing import TypeVar

import torch

from mtrain.arch.layout import Layout
from mtrain.base import pulse
from mtrain.base.environment import RankEnvironment, git_checkout, program_versions
from mtrain.base.errors import NumericError, SpoiledStateError, StopRequestedError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.heartbeat import Heartbeat, Phase
from mtrain.base.signals import StopSignal
from mtrain.checkpoint.state.replicas import ReplicaCheck
from mtrain.checkpoint.state.save import Provenance, Saver
from mtrain.checkpoint.store.directory import load_entry
from mtrain.checkpoint.store.manifest import GitState
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import TrainSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.training_state import spoil_point
from mtrain.core.layers.certified import candidate_of, finding, machine_of
from mtrain.core.layers.layer_spec import chosen_backend
from mtrain.core.ranks import patience
from mtrain.core.ranks.deterministic import VARIABLES, deterministic
from mtrain.core.ranks.groups import Groups, opened_groups
from mtrain.core.ranks.init import (
    any_rank,
    init_distributed,
    naming_lack_of_memory,
    naming_lost_ranks,
    on_all_ranks,
    on_first_rank,
    with_the_slowest,
)
from mtrain.core.ranks.party import purpose_of
from mtrain.data.epochs import with_num_steps
from mtrain.data.shown import as_text
from mtrain.hf.schema.registry import refuse_unexportable
from mtrain.report.metrics.sinks import Sinks
from mtrain.runs.account import StartAccount
from mtrain.runs.failure import clear_summary, recording
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run, build_run
from mtrain.training.checkpoint_self_test import run_self_test
from mtrain.training.due import Due
from mtrain.training.evaluate import evaluate_all
from mtrain.training.export import Exporter
from mtrain.training.faults.guard import Guard
from mtrain.training.faults.rollback import as_rollback, roll_back
from mtrain.training.faults.trial import RollBackError, StepOutcome, StepTrial, named
from mtrain.training.inputs import valid_measure
from mtrain.training.recording.life import Life
from mtrain.training.recording.profiling import StepProfiler
from mtrain.training.recording.sinks import SignsOfLife, open_sinks
from mtrain.training.recording.slow_ranks import SlowRanks
from mtrain.training.recording.step_record import record_of
from mtrain.training.run_folder import Claimed, claim
from mtrain.training.sampling.in_training import PromptSamples

_log = logging.getLogger(__name__)

Counted = TypeVar("Counted")
_NUM_FIRST_SAMPLES = 8
"""Number of samples of the first step that are written to the run folder."""


def train(config: Config) -> bool:
    """Trains from the newest checkpoint of the run folder, or from the start, to `train.num_steps`.

    A stop signal on any rank ends the run after the current step, with a checkpoint and the marker REQUEUE; a signal
    before the first step leaves only the marker. The function may be called again in the same process, and in a thread,
    which sees signals if the main thread holds a StopSignal.

    Returns:
        Whether the run has come to its end; false if a signal has stopped it and the caller holds a StopSignal.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a notebook's interrupt, has come, and the caller holds no StopSignal; the run was
            stopped or is done, and all is saved.
        StopRequestedError: The same for another stop signal, or one of another rank.
        MtrainError: A part of the run fails; see mtrain/base/errors.py for the exit codes.
    """
    environment = RankEnvironment.from_environ(os.environ)
    layout = Layout.from_config(config, environment.world_size)
    refuse_unexportable(config)
    timeout_s = config.train.process_group_timeout_s
    with (
        # first, so that a signal that comes while ranks connect is not lost
        StopSignal() as signal,
        deterministic(config.train.deterministic),
        init_distributed(environment, config.train.device, timeout_s, purpose_of("train", config)) as device,
        opened_groups(layout, device, config.train.seed, timeout_s) as groups,
    ):
        try:
            if config.train.num_epochs is not None:
                config = _counted(lambda: with_num_steps(config), config, groups.rank)
            stopped = train_on(groups, config, signal)
        except StopRequestedError as stop:  # of counting: `train_on` raises none
            stopped = str(stop)
            on_first_rank(lambda: _to_be_requeued(RunFolder(Path(config.run.dir)), stopped))
    if signal.is_outermost and (stopped is not None or signal.received is not None):
        reason = "stopped by a signal when the run was done" if stopped is None else stopped
        raise KeyboardInterrupt(reason) if signal.received == SIGINT else StopRequestedError(reason)
    return stopped is None


def _to_be_requeued(folder: RunFolder, reason: str) -> None:
    """Leaves the marker of a run that was stopped before it had claimed its folder."""
    folder.create()
    with folder.locked():
        folder.set_requeue(reason)
    _log.info(f"{reason}; the same command goes on")


def _counted(count: Callable[[], Counted], uncounted: Counted, rank: int) -> Counted:
    """Returns the result of `count` on rank 0, which may tokenise longer than a collective waits. Collective over the
    world."""
    counted = on_all_ranks(lambda: with_the_slowest(count if rank == 0 else lambda: uncounted))
    return on_first_rank(lambda: counted)


Build = Callable[[Config, Groups, RunFolder], Run]
Reopen = Callable[[Run], Sinks]
"""Function that opens the sinks of a run that continues after its start step."""


def train_on(groups: Groups, config: Config, signal: StopSignal, build: Build = build_run) -> str | None:
    """Trains as `train` does, on groups that were just opened. Collective over the world.

    Args:
        build: Function that builds the run; a check replaces it to observe the run.

    Returns:
        Sentence on the stop signal that has ended the run; None if it has come to its end.

    Raises:
        MtrainError: A part of the run fails; see mtrain/base/errors.py for the exit codes.
    """
    folder = RunFolder(Path(config.run.dir))
    with contextlib.ExitStack() as held:
        life = Life(folder, groups.rank)
        lock, config = on_first_rank(lambda: _enter(folder, config, groups, life, held))
        held.enter_context(life)
        heartbeat, account = _open_reporting(folder, lock.number, config.train, groups, held)
        if any_rank(signal.received is not None, groups.device):
            return _stopped(life, "stopped by a signal before the model was built")
        heartbeat.enter(Phase.BUILD, 0)
        try:
            run = build(config, groups, folder)
        except StopRequestedError as stop:  # on all ranks
            return _stopped(life, str(stop))
        account.goes_on(run.start_step)
        if any_rank(signal.received is not None, groups.device) and run.start_step < config.train.num_steps:
            return _stopped(life, f"stopped by a signal before step {run.start_step + 1}")
        if run.start_step >= config.train.num_steps and groups.rank == 0:
            _log.info(_finished(run, folder))
        if config.checkpoint.self_test:
            run_self_test(run, folder.checkpoints)
        on_first_rank(lambda: _write_first_samples(run, folder))
        records, signs = held.enter_context(contextlib.ExitStack()), SignsOfLife(life, heartbeat, account)
        known = (config, _origin(run), lock.check, run.start_step, _save_listener(life, account))
        saver = Saver(folder.checkpoints, run.model.groups, *known)
        exporter = Exporter(folder, config.checkpoint.export_hf_every_steps if groups.rank == 0 else 0, lock.check)
        held.callback(exporter.close)
        reopen: Reopen = functools.partial(open_sinks, folder=folder, lock=lock, signs=signs)
        slow = SlowRanks(config.watch, groups, heartbeat, life)
        account.before_each(slow.look)
        profiler = StepProfiler(config.metrics, folder.profile, groups.rank, groups.device)
        held.callback(profiler.close)
        guard = Guard(config.train, run.history)
        samples = PromptSamples(config, folder, run.model.chunks, groups.rank == 0)
        records.callback(samples.close)
        course = _Course(run, guard, saver, exporter, signal, heartbeat, life, slow, profiler, samples)
        try:
            stopped_after = _with_rollbacks(course, folder, account, records, reopen)
        except NumericError as error:  # on all ranks
            raise NumericError(f"{error}; {saver.give_up()}") from error
        if stopped_after is not None:
            return _stopped(life, f"stopped by a signal after step {stopped_after}")
        heartbeat.enter(Phase.EXPORT, heartbeat.step)
        return _exported(exporter, signal, life)


def _exported(exporter: Exporter, signal: StopSignal, life: Life) -> str | None:
    """Waits for the exports; returns why they are not complete. Not a collective, and none follows."""
    if not exporter.finish(lambda: signal.received is not None):
        return None
    reason = "stopped by a signal before all checkpoints were exported"
    life.stopped(reason)
    return reason


def _stopped(life: Life, reason: str) -> str:
    """Notes on the first rank that a signal has ended the run; returns the reason. Collective over the world."""
    on_first_rank(lambda: life.stopped(reason))
    return reason


def _open_reporting(
    folder: RunFolder, number: int, train: TrainSection, groups: Groups, held: contextlib.ExitStack
) -> tuple[Heartbeat, StartAccount]:
    """Starts reporting the phase of this start, its use of time, and the reason if it fails."""
    if (own := pulse.current()) is not None:
        own.start_number = number
    size, timeout_s = groups.layout.world_size, train.process_group_timeout_s
    account = held.enter_context(StartAccount(folder.starts, number, groups.rank, size))
    heartbeat = Heartbeat(folder.heartbeats, groups.rank, size, timeout_s, number, account.write)
    account.phases_of(held.enter_context(heartbeat))
    held.enter_context(recording(folder.path, groups.rank, number, lambda: heartbeat.place))
    held.enter_context(deterministic(train.deterministic))  # here too: what it raises is recorded
    held.enter_context(naming_lack_of_memory())
    held.enter_context(naming_lost_ranks(heartbeat.missing))
    return heartbeat, account


def _save_listener(life: Life, account: StartAccount) -> Callable[[int, float], None]:
    def saved(step: int, seconds: float) -> None:
        account.saved(step)
        life.saved(step, seconds)

    return saved


def _finished(run: Run, folder: RunFolder) -> str:
    """Returns the message of a start that finds nothing left to train."""
    return (
        f"{folder.path} is finished: its newest checkpoint has {run.start_step} steps done, and train.num_steps="
        f"{run.model.config.train.num_steps}; nothing is trained. Raise train.num_steps to go on, or set another "
        "run.dir"
    )


def _origin(run: Run) -> Provenance:
    """Returns the provenance of this run for manifests, which the first rank writes."""
    if run.model.groups.rank != 0 or run.loader is None:
        return Provenance()
    checkout = git_checkout()
    git = None if checkout is None else GitState(commit=checkout.commit, dirty=checkout.dirty)
    config = run.model.config
    measure = valid_measure(config.loss, config.data, run.inputs)
    return Provenance(run.loader.fingerprint, git, run.changes, run.inputs, measure)


def _environment(device: torch.device, layout: Layout) -> dict[str, str]:
    """Returns all that can change the last digits of a run, and nothing that reveals where or by whom it was run."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    chosen = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    shape = {"device": kind, "layout": str(layout), "world_size": str(layout.world_size)}
    if device.type == "cuda":
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        chosen["nccl"] = ".".join(map(str, nccl))
    if (checkout := git_checkout()) is not None:
        chosen["commit"] = checkout.commit + ", changed" * checkout.dirty
    return {**program_versions(), **machine_of(device), **shape, **chosen}


def _certificate(config: Sections, device: torch.device) -> dict[str, str]:
    """Names the certificate of `mtrain verify backend` by which layers are chosen, if any."""
    found = finding(config, device, candidate_of(config))
    named = {} if found.comparison is None or config.model.backend == "torch" else {"certificate": found.certificate}
    return named | ({"delta_rule": "flash-linear-attention"} if chosen_backend(config, device) == "fla" else {})


def _enter(folder: RunFolder, config: Config, groups: Groups, life: Life, held: contextlib.ExitStack) -> Claimed:
    """Claims the run folder and writes the resolved configuration and the environment. On rank 0."""
    claimed = claim(folder, config, held)
    environment = _environment(groups.device, groups.layout) | _certificate(config, groups.device)
    folder.write_environment(environment)
    folder.clear_requeue()
    with disk_faults(f"write {folder.path}"):
        clear_summary(folder.path)
    life.started(claimed.config, environment, claimed.lock.check)
    return claimed


def _write_first_samples(run: Run, folder: RunFolder) -> None:
    """Writes samples of the first step for people to check, once in a run."""
    if run.loader is not None and not folder.first_samples.exists():
        text = as_text(run.loader.shown(run.start_step + 1, _NUM_FIRST_SAMPLES))
        with contextlib.suppress(OSError):  # for people only
            write_atomically(folder.first_samples, text)


@dataclass
class _Course:
    """Objects that the training loop works with."""

    run: Run
    guard: Guard
    saver: Saver
    exporter: Exporter
    signal: StopSignal
    heartbeat: Heartbeat
    life: Life
    slow: SlowRanks
    profiler: StepProfiler
    samples: PromptSamples


def _with_rollbacks(
    course: _Course, folder: RunFolder, account: StartAccount, opened: contextlib.ExitStack, reopen: Reopen
) -> int | None:
    """Runs `_loop` from the start step and after each rollback to a checkpoint; waits for saves."""
    heartbeat, saver = course.heartbeat, course.saver
    while True:
        try:
            stopped_after = _loop(course, opened.enter_context(reopen(course.run)))
            last = course.run.model.config.train.num_steps if stopped_after is None else stopped_after
            heartbeat.enter(Phase.SAVE, last)
            saver.finish()
            return stopped_after
        except (RollBackError, SpoiledStateError) as error:
            wanted = as_rollback(error, course.guard, heartbeat.step)
        heartbeat.enter(Phase.BUILD, wanted.step)
        opened.close()  # records after the checkpoint are removed when the sinks open again
        course.run = roll_back(course.run, folder, saver, course.exporter, course.guard, wanted)
        account.gone_back(course.run.start_step)
        course.life.rolled_back(course.run.start_step, wanted.step, str(wanted))


def _loop(course: _Course, sinks: Sinks) -> int | None:
    """Trains all steps; returns the number of the last one if a signal stopped the run early, else None."""
    run, last = course.run, course.run.model.config.train.num_steps
    start = run.start_step
    loop = _Loop(course, sinks, on_first_rank(lambda: _tokens_before(run)))
    course.samples.begin(start)
    if start == 0:
        loop.validate_if_due(0)
        loop.ask_if_due(0)
    with _batches(run) as batches:
        for step in range(start + 1, last + 1):
            course.heartbeat.enter(Phase.DATA, step)
            own = None if batches is None else next(batches)
            made = loop.train(own, step)
            valid_loss = loop.validate_if_due(step)
            loop.ask_if_due(step)
            if loop.leave(made, own, step, valid_loss):
                return step
    return None


class _Loop:
    """The steps of a run from its start, or from a rollback, to the end."""

    def __init__(self, course: _Course, sinks: Sinks, tokens: int) -> None:
        """
        Args:
            tokens: Number of text tokens that the run has read before.
        """
        self._course, self._sinks, self._tokens = course, sinks, tokens
        self._run, self._saver, self._heartbeat = course.run, course.saver, course.heartbeat
        config = course.run.model.config
        self._config, self._last = config, config.train.num_steps
        self._validation = Due(config.valid.interval_steps, config.valid.at_end, config.valid.at_start)
        self._saving = Due(config.checkpoint.interval_steps, config.checkpoint.at_end)
        self._replicas = Due(config.train.check_replicas_every_steps)
        self._replica_check = ReplicaCheck(course.run.model.groups)
        self._trial = StepTrial(course.run, course.guard, course.heartbeat)

    def train(self, own: Sequence[Microbatch] | None, step: int) -> StepOutcome:
        """Makes one step and records it."""
        course, run = self._course, self._run
        began, waited_before_s = time.perf_counter(), patience.waited_s()
        lr = run.learning_rate(course.guard.updates_before(step), self._config.optimizer, self._last)
        with course.profiler.step(step):
            made = self._trial.make(own, lr, step, lambda: course.signal.received is not None)
        if made.is_applied:
            self._saver.confirm(step - 1)  # loss and gradient of the weights before the update were finite
            if step == run.start_step + 1:
                self._saver.expect(run.model)
        spoil_point(run.model, step)
        took_s, waited_s = time.perf_counter() - began, patience.waited_s() - waited_before_s
        record = course.slow.noted(record_of(run, step, made, lr, took_s), waited_s)
        self._sinks.write(record)
        if made.refused is None:
            self._tokens += record.tokens
        else:
            course.life.alarmed(step, made.refused)
        # a collective while a save is in flight
        self._saver.poll()
        return made

    def validate_if_due(self, step: int) -> float | None:
        """Returns the loss of the first validation set, in nats; None if nothing was validated."""
        if not self._validation.after(step, self._last):
            return None
        return _validate(self._run, self._sinks, step, self._heartbeat)

    def ask_if_due(self, step: int) -> None:
        """Answers the prompts of `eval`."""
        if self._course.samples.due.after(step, self._last):
            self._heartbeat.enter(Phase.VALIDATION, step)
            with named(f"samples after step {step}"):
                self._course.samples.take(self._run, step, self._sinks)

    def leave(self, made: StepOutcome, own: Sequence[Microbatch] | None, step: int, valid_loss: float | None) -> bool:
        """Checks and saves what a step has left; says whether the run stops here before its last step."""
        exporter, is_last = self._course.exporter, step == self._last
        if made.stop_requested:
            exporter.stop()  # also after the last step: the checkpoint needs the disk now
        is_stopped = made.stop_requested and not is_last
        is_saved = is_stopped or self._saving.after(step, self._last)
        if self._replicas.after(step, self._last) or (is_saved and self._replicas.every > 0):
            with named(f"after step {step}"):
                self._replica_check.run(self._run.model)
        if valid_loss is not None:
            self._saver.confirm(step)
        elif is_saved and is_last and made.has_learned:
            _try_last_weights(self._run, own, step, self._heartbeat)
            self._saver.confirm(step)
        if is_saved:
            self._heartbeat.enter(Phase.SAVE, step)
            exporter.expect(step)
            self._saver.save(self._run.model, step, valid_loss, self._tokens, self._course.guard.history)
        exporter.poll()
        return is_stopped


def _try_last_weights(run: Run, own: Sequence[Microbatch] | None, done: int, heartbeat: Heartbeat) -> None:
    """Runs a forward pass with the weights of the last step, since no later step shows whether they can be used."""
    heartbeat.enter(Phase.VALIDATION, done)
    with named(f"the weights that step {done}, the last one, has left"):
        run.training.try_weights(own)


def _tokens_before(run: Run) -> int:
    """Returns the number of text tokens that the run has read before this start, from the checkpoint's manifest."""
    folder = RunFolder(Path(run.model.config.run.dir)).checkpoints
    steps = [step for step in published_steps(folder) if step <= run.start_step]
    return load_entry(folder / step_name(steps[-1])).manifest.tokens if steps else 0


@contextlib.contextmanager
def _batches(run: Run) -> Iterator[Iterator[Sequence[Microbatch]] | None]:
    """Yields this data-parallel rank's microbatches of each step from the start step on; None if it receives them."""
    if run.loader is None:
        yield None
        return
    with run.loader.iterate(run.start_step, pinned=run.model.groups.device.type == "cuda") as batches:
        yield batches


def _validate(run: Run, sinks: Sinks, step: int, heartbeat: Heartbeat) -> float | None:
    """Validates, and returns the loss of the first set, in nats; None if the run has no validation set."""
    if not run.validation:
        return None
    heartbeat.enter(Phase.VALIDATION, step)
    with named(f"validation after step {step}"):
        record = evaluate_all(run.model, run.objective, run.validation, step, run.teacher)
    sinks.write(record)
    return record.valid_loss
