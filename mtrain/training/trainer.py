"""Training loop of a run."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT

import torch

from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.base.environment import RankEnvironment, git_checkout, program_versions
from mtrain.base.errors import DataError, NumericError, SpoiledStateError, StopRequestedError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.heartbeat import Heartbeat, Phase, current_pulse
from mtrain.base.signals import StopSignal
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.replicas import ReplicaCheck
from mtrain.checkpoint.state.save import Provenance, Saver
from mtrain.checkpoint.store.directory import newest_good
from mtrain.checkpoint.store.manifest import GitState, MetricInfo
from mtrain.checkpoint.store.retention import Keep, Retention
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
from mtrain.data.shown import as_text
from mtrain.data.sources import with_num_steps
from mtrain.hf.schema.registry import refuse_unexportable
from mtrain.report.metrics.record import TaskRecord, ValidRecord
from mtrain.report.metrics.sinks import Sinks
from mtrain.runs.failure import clear_summary, recording
from mtrain.runs.folder import RunFolder
from mtrain.runs.goodput import StartAccount
from mtrain.runs.lock import RunLock
from mtrain.training.bad_steps import Guard, RollBackError, StepOutcome, StepTrial, named, roll_back
from mtrain.training.best import Patience, Results
from mtrain.training.build import Run, build_run
from mtrain.training.changed import valid_measure
from mtrain.training.checkpoint_self_test import run_self_test
from mtrain.training.evaluate import Due, evaluate_all
from mtrain.training.export import Exporter
from mtrain.training.recording import Life, SlowRanks, StepProfiler, open_sinks, record_of
from mtrain.training.resume import claim
from mtrain.training.sampling.generate import PromptSamples
from mtrain.training.tasks.run import RunTasks

_log = logging.getLogger(__name__)

_NUM_FIRST_SAMPLES = 8
"""Number of samples of the first step that are written to the run folder."""


def train(config: Config) -> bool:
    """Trains from the newest checkpoint of the run folder, or from the start, to `train.num_steps`.

    A stop signal on any rank ends the run after the current step, with a checkpoint and the marker REQUEUE; a signal
    before the first step leaves only the marker. The function may be called again in the same process, and in a thread,
    which sees signals if the main thread holds a StopSignal.

    Returns:
        Whether the run is complete; false if a signal has stopped it and the caller holds a StopSignal.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C or interrupted the notebook, and the caller holds no StopSignal. The
            run has stopped or is complete, and everything is saved.
        StopRequestedError: The same for another stop signal, or one that another rank received.
        MtrainError: A part of the run fails; see mtrain/base/errors.py for the exit codes.
    """
    environment = RankEnvironment.from_environ(os.environ)
    layout = Layout.from_config(config, environment.world_size)
    refuse_unexportable(config)
    timeout_s = config.train.process_group_timeout_s
    with (
        # first, so that a signal during the connection of ranks is not lost
        StopSignal() as signal,
        deterministic(config.train.deterministic),
        init_distributed(environment, config.train.device, timeout_s, purpose_of("train", config)) as device,
        opened_groups(layout, device, config.train.seed, timeout_s) as groups,
    ):
        try:
            if config.train.num_epochs is not None:
                config = _with_counted_steps(config, groups.rank)
            stopped = train_on(groups, config, signal)
        except StopRequestedError as stop:  # raised by `_with_counted_steps`, never by `train_on`
            stopped = str(stop)
            on_first_rank(lambda: _mark_for_requeue(RunFolder(Path(config.run.dir)), stopped))
    if signal.is_outermost and (stopped is not None or signal.received is not None):
        reason = "stopped by a signal when the run was done" if stopped is None else stopped
        raise KeyboardInterrupt(reason) if signal.received == SIGINT else StopRequestedError(reason)
    return stopped is None


def _mark_for_requeue(folder: RunFolder, reason: str) -> None:
    """Writes the marker REQUEUE for a run that was stopped before it claimed its folder."""
    folder.create()
    with folder.locked():
        folder.set_requeue(reason)
    _log.info(f"{reason}; the same command resumes")


def _with_counted_steps(config: Config, rank: int) -> Config:
    """Returns the configuration with the number of steps. Rank 0 counts, which may take longer than the timeout of a
    collective if it tokenises. Collective over the world."""
    counted = on_all_ranks(lambda: with_the_slowest(lambda: with_num_steps(config) if rank == 0 else config))
    return on_first_rank(lambda: counted)


Build = Callable[[Config, Groups, RunFolder], Run]


def train_on(groups: Groups, config: Config, signal: StopSignal, build: Build = build_run) -> str | None:
    """Trains as `train` does, on groups that were just opened. Collective over the world.

    Args:
        build: Function that builds the run; checks replace it to observe the run.

    Returns:
        Sentence that says when a stop signal ended the run; None if the run is complete.

    Raises:
        MtrainError: A part of the run fails; see mtrain/base/errors.py for the exit codes.
    """
    folder = RunFolder(Path(config.run.dir))
    with contextlib.ExitStack() as resources:
        life = Life(folder, groups.rank)
        lock, config = on_first_rank(lambda: _claim_folder(folder, config, groups, life, resources))
        resources.enter_context(life)
        heartbeat, account = _open_reporting(folder, lock.number, config.train, groups, resources)
        if any_rank(signal.received is not None, groups.device):
            return _record_stop(life, "stopped by a signal before the model was built")
        heartbeat.enter(Phase.BUILD, 0)
        on_first_rank(lambda: _say_if_finished(folder, config.train.num_steps))  # weights may take minutes to read
        try:
            run = build(config, groups, folder)
        except StopRequestedError as stop:  # on all ranks
            return _record_stop(life, str(stop))
        account.goes_on(run.start_step)
        if any_rank(signal.received is not None, groups.device) and run.start_step < config.train.num_steps:
            return _record_stop(life, f"stopped by a signal before step {run.start_step + 1}")
        if config.checkpoint.self_test:
            run_self_test(run, folder.checkpoints)
        on_first_rank(lambda: _write_first_samples(run, folder))
        records = resources.enter_context(contextlib.ExitStack())

        def saved(step: int, seconds: float) -> None:
            account.saved(step)
            life.saved(step, seconds)

        retention = Retention(folder.checkpoints, Keep.of(config.checkpoint), lock.check, run.start_step)
        saver = Saver(run.model, retention, _origin(run), saved)
        exporter = Exporter(folder, config.checkpoint.export_hf_every_steps if groups.rank == 0 else 0, lock.check)
        resources.callback(exporter.close)
        slow = SlowRanks(config.watch, groups, heartbeat, life)
        heartbeat.on_beat.append(slow.look)
        profiler = StepProfiler(config.metrics, folder.profile, groups.rank, groups.device)
        resources.callback(profiler.close)
        samples = PromptSamples(config, folder, run.model.chunks, groups.rank == 0)
        records.callback(samples.close)
        tasks = RunTasks(run.model)
        reopen = functools.partial(open_sinks, folder=folder, lock=lock, life=life)
        reporting = (heartbeat, life, account, slow, profiler)
        loop = _Loop(run, folder, Guard(config.train, run.history), saver, exporter, samples, tasks, signal, *reporting)
        try:
            stopped_after = loop.run_with_rollbacks(records, reopen)
        except NumericError as error:  # on all ranks
            raise NumericError(f"{error}; {saver.give_up()}") from error
        if stopped_after is not None:
            return _record_stop(life, f"stopped by a signal after step {stopped_after}")
        if config.checkpoint.export_hf_every_steps:
            heartbeat.enter(Phase.EXPORT, heartbeat.step)
        return _finish_exports(exporter, signal, life)


def _finish_exports(exporter: Exporter, signal: StopSignal, life: Life) -> str | None:
    """Waits for the exports; records and returns the reason if a signal ends them. Not a collective, and none
    follows."""
    if not exporter.finish(lambda: signal.received is not None):
        return None
    reason = "stopped by a signal before all checkpoints were exported"
    life.stopped(reason)
    return reason


def _say_if_finished(folder: RunFolder, num_steps: int) -> None:
    newest = None
    with contextlib.suppress(DataError):  # loading reports it
        newest = newest_good(folder.checkpoints).entry
    if newest is not None and newest.step >= num_steps:
        _log.info(
            f"{folder.path} is finished: its newest checkpoint has completed {counted(newest.step, 'step')}, and "
            f"train.num_steps={num_steps}; nothing is trained. Raise train.num_steps to continue, or set another "
            "run.dir"
        )


def _record_stop(life: Life, reason: str) -> str:
    """Records on the first rank that a signal has ended the run; returns the reason. Collective over the world."""
    on_first_rank(lambda: life.stopped(reason))
    return reason


def _open_reporting(
    folder: RunFolder, number: int, train: TrainSection, groups: Groups, resources: contextlib.ExitStack
) -> tuple[Heartbeat, StartAccount]:
    """Starts to report this start's phase, its use of time, and the cause if it fails."""
    if (pulse := current_pulse()) is not None:
        pulse.start_number = number
    size, timeout_s = groups.layout.world_size, train.process_group_timeout_s
    account = resources.enter_context(StartAccount(folder.starts, number, groups.rank, size))
    heartbeat = Heartbeat(folder.heartbeats, groups.rank, size, timeout_s, number)
    account.follow(heartbeat)
    resources.enter_context(heartbeat)
    resources.enter_context(recording(folder.path, groups.rank, number, lambda: heartbeat.place))
    resources.enter_context(deterministic(train.deterministic))  # again, so that its errors are recorded
    resources.enter_context(naming_lack_of_memory())
    resources.enter_context(naming_lost_ranks(heartbeat.missing))
    return heartbeat, account


def _origin(run: Run) -> Provenance:
    """Returns the provenance of this run for manifests, which the first rank writes."""
    if run.model.groups.rank != 0 or run.loader is None:
        return Provenance()
    checkout = git_checkout()
    git = None if checkout is None else GitState(commit=checkout.commit, dirty=checkout.dirty)
    config = run.model.config
    # with tasks, or for the first of the sets
    name = config.valid.metric if config.valid.metric in {validation.name for validation in run.validation} else None
    measure = valid_measure(config.loss, config.data, run.inputs, name)
    return Provenance(run.loader.fingerprint, git, run.changes, run.inputs, measure)


def _environment(device: torch.device, layout: Layout) -> dict[str, str]:
    """Returns everything that can change the last digits of a run, and nothing that reveals where or by whom it ran."""
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
    """Returns the certificate of `mtrain verify backend` that decides between layers, if any, and other choices."""
    result = finding(config, device, candidate_of(config))
    named = {} if result.comparison is None or config.model.backend == "torch" else {"certificate": result.certificate}
    return named | ({"delta_rule": "flash-linear-attention"} if chosen_backend(config, device) == "fla" else {})


def _claim_folder(
    folder: RunFolder, config: Config, groups: Groups, life: Life, resources: contextlib.ExitStack
) -> tuple[RunLock, Config]:
    """Claims the run folder and writes the resolved configuration and the environment. On rank 0."""
    lock, config = claim(folder, config, resources)
    environment = _environment(groups.device, groups.layout) | _certificate(config, groups.device)
    folder.write_environment(environment)
    folder.clear_requeue()
    with disk_faults(f"write {folder.path}"):
        clear_summary(folder.path)
    life.started(config, environment, lock.check)
    return lock, config


def _write_first_samples(run: Run, folder: RunFolder) -> None:
    """Writes samples of the first step for people to check, once in a run."""
    if run.loader is not None and not folder.first_samples.exists():
        text = as_text(run.loader.shown(run.start_step + 1, _NUM_FIRST_SAMPLES))
        with contextlib.suppress(OSError):  # the run does not need them
            write_atomically(folder.first_samples, text)


@dataclass
class _Loop:
    """Makes the steps of a run, from its start or from a rollback to the end."""

    run: Run
    folder: RunFolder
    guard: Guard
    saver: Saver
    exporter: Exporter
    samples: PromptSamples
    """Answers to the prompts of `eval`, not training samples."""
    tasks: RunTasks
    signal: StopSignal
    heartbeat: Heartbeat
    life: Life
    account: StartAccount
    slow: SlowRanks
    profiler: StepProfiler

    def __post_init__(self) -> None:
        config = self.run.model.config
        self._last = config.train.num_steps
        self._validation = Due(config.valid.interval_steps, config.valid.at_end, config.valid.at_start)
        self._saving = Due(config.checkpoint.interval_steps, config.checkpoint.at_end)
        self._replicas = Due(config.train.check_replicas_every_steps)
        self._replica_check = ReplicaCheck(self.run.model.groups)

    def run_with_rollbacks(self, opened: contextlib.ExitStack, reopen: Callable[[Run], Sinks]) -> int | None:
        """Makes all steps, again after each rollback to a checkpoint, and waits for saves.

        Args:
            opened: Closes the sinks at a rollback.
            reopen: Opens the sinks of a run that continues after its start step.

        Returns:
            Number of the last step if a signal stopped the run early, else None.
        """
        while True:
            try:
                self._sinks = opened.enter_context(reopen(self.run))
                stopped_after = self._run_to_end()
                self.heartbeat.enter(Phase.SAVE, self._last if stopped_after is None else stopped_after)
                self.saver.finish()
                return stopped_after
            except RollBackError as error:
                rollback = error
            except SpoiledStateError as error:  # found by a save
                self.guard.refuse(self.heartbeat.step, error)  # raises unless the action is rollback
                rollback = RollBackError(self.heartbeat.step, str(error))
            self.heartbeat.enter(Phase.BUILD, rollback.step)
            opened.close()  # records after the checkpoint are removed when the sinks open again
            self.run = roll_back(self.run, self.folder, self.saver, self.exporter, self.guard, rollback)
            self.account.gone_back(self.run.start_step)
            self.life.rolled_back(self.run.start_step, rollback.step, str(rollback))

    def _run_to_end(self) -> int | None:
        run, start = self.run, self.run.start_step
        self._trial = StepTrial(run, self.guard, self.heartbeat)
        self._tokens = run.tokens
        self.samples.begin(start)
        self._patience = self._patience_so_far(start)
        if self._patience.is_over:
            self._end_early(start)
            return None
        if start == 0:
            self._patience.add(0, self.tasks.metric.of(self._evaluate_if_due(0)))
        pinned = run.model.groups.device.type == "cuda"
        with contextlib.nullcontext() if run.loader is None else run.loader.iterate(start, pinned) as batches:
            for step in range(start + 1, self._last + 1):
                self.heartbeat.enter(Phase.DATA, step)
                microbatches = None if batches is None else next(batches)
                made = self._train(microbatches, step)
                results = self._evaluate_if_due(step)
                self._patience.add(step, self.tasks.metric.of(results))
                if self._patience.is_over:
                    self._end_early(step)
                if self._end_step(made, microbatches, step, results):
                    return step
                if step == self._last:
                    break
        return None

    def _patience_so_far(self, start: int) -> Patience:
        """Returns the results of earlier starts up to the step that this one continues from. Collective over the
        world."""
        patience = Patience(self.tasks.metric, self.run.model.config.valid)
        if start > 0 and patience.section.patience is not None:
            on_first_rank(lambda: patience.read(self.folder.metrics))
        patience.best, patience.num_waited = on_first_rank(lambda: (patience.best, patience.num_waited))
        return patience

    def _end_early(self, step: int) -> None:
        """Ends the run after this step."""
        self._last = step
        if self.run.model.groups.rank == 0:
            _log.info(f"the run ends early after step {step}: {self._patience}; raise valid.patience to train on")

    def _train(self, microbatches: Sequence[Microbatch] | None, step: int) -> StepOutcome:
        """Makes one step and records it."""
        run = self.run
        began, waited_before_s = time.perf_counter(), patience.waited_s()
        lr = learning_rate(self.guard.updates_before(step), run.model.config.optimizer, self._last)
        with self.profiler.step(step):
            made = self._trial.make(microbatches, lr, step, lambda: self.signal.received is not None)
        if made.is_applied:
            self.saver.confirm(step - 1)  # loss and gradient of the weights before the update were finite
            if step == run.start_step + 1:
                self.saver.expect()
        spoil_point(run.model, step)
        took_s, waited_s = time.perf_counter() - began, patience.waited_s() - waited_before_s
        record = self.slow.noted(record_of(run, step, made, lr, took_s), waited_s)
        self._sinks.write(record)
        self.life.stepped(step)
        self.account.completed(step, record.seconds)
        if record.memory_bytes is not None:
            self.heartbeat.note_memory(record.memory_bytes)
        if made.refused is None:
            self._tokens += record.tokens
        else:
            self.life.alarmed(step, made.refused)
        # a collective while a save is in flight
        self.saver.poll()
        return made

    def _evaluate_if_due(self, step: int) -> Results:
        """Validates, evaluates the tasks and answers the prompts of `eval`; returns the results after this step."""
        results = [self._validate_if_due(step), self._evaluate_tasks_if_due(step)]
        self._answer_prompts_if_due(step)
        return [record for record in results if record is not None]

    def _evaluate_tasks_if_due(self, step: int) -> TaskRecord | None:
        if not self.tasks.due.after(step, self._last):
            return None
        self.heartbeat.enter(Phase.VALIDATION, step)
        with named(f"tasks after step {step}"):
            record = self.tasks.take(self.run, step)
        self._sinks.write(record)
        return record

    def _validate_if_due(self, step: int) -> ValidRecord | None:
        run = self.run
        if not self._validation.after(step, self._last) or not run.validation:
            return None
        self.heartbeat.enter(Phase.VALIDATION, step)
        with named(f"validation after step {step}"):
            record = evaluate_all(run.model, run.objective, run.validation, step, run.teacher)
        self._sinks.write(record)
        return record

    def _answer_prompts_if_due(self, step: int) -> None:
        """Answers the prompts of `eval`."""
        if self.samples.due.after(step, self._last):
            self.heartbeat.enter(Phase.VALIDATION, step)
            with named(f"samples after step {step}"):
                self.samples.take(self.run, step, self._sinks)

    def _end_step(
        self, made: StepOutcome, microbatches: Sequence[Microbatch] | None, step: int, results: Results
    ) -> bool:
        """Checks and saves the state after a step; returns whether the run stops before its last step."""
        is_last = step == self._last
        if made.stop_requested:
            self.exporter.stop()  # also after the last step, since the checkpoint needs the disk now
        is_stopped = made.stop_requested and not is_last
        is_saved = is_stopped or self._saving.after(step, self._last)
        if self._replicas.after(step, self._last) or (is_saved and self._replicas.every > 0):
            with named(f"after step {step}"):
                self._replica_check.run(self.run.model)
        if any(isinstance(record, ValidRecord) for record in results):
            self.saver.confirm(step)
        elif is_saved and is_last and made.has_learned:
            # no later step shows whether these weights are usable
            self.heartbeat.enter(Phase.VALIDATION, step)
            with named(f"the weights after step {step}, the last one"):
                self.run.training.try_weights(microbatches)
            self.saver.confirm(step)
        if is_saved:
            self.heartbeat.enter(Phase.SAVE, step)
            self.exporter.expect(step)
            self.saver.save(step, self._judged(results), self._tokens, self.guard.history)
        self.exporter.poll()
        return is_stopped

    def _judged(self, results: Results) -> float | MetricInfo | None:
        """Returns the value of valid.metric for the manifest; None if it was not evaluated."""
        metric, value = self.tasks.metric, self.tasks.metric.of(results)
        if value is None or not metric.is_of_tasks:
            return value
        return metric.info(value, self.run.model.config.eval)
