"""Records a run while it trains: events, slow ranks, steps and their sinks, and profiles."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from mtrain.arch import Work, flops_of_step, mfu, peak_flops
from mtrain.base.errors import MtrainError, RankLostError, RunFolderError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.heartbeat import Beat, Heartbeat
from mtrain.base.spelling import counted
from mtrain.checkpoint.store.steps import published_steps
from mtrain.config import Config
from mtrain.config.changes import flat_keys
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.config.schema.run import MetricsSection, WatchSection
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import on_first_rank
from mtrain.data.ledger import StartEntry, StepEntry, rewind_ledger, to_line
from mtrain.report.metrics.jsonl import AppendedFile, JsonlSink, last_step
from mtrain.report.metrics.record import ChangeRecord, Record, StepRecord
from mtrain.report.metrics.sinks import ConsoleSink, Sink, Sinks, TensorBoardSink
from mtrain.report.metrics.trackers.open import TrackedRun, refuse_missing, tracked_run, tracker_sink
from mtrain.runs.events import EventKind, EventLog, Fact
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import RunLock
from mtrain.training.bad_steps import StepOutcome
from mtrain.training.build import Run
from mtrain.training.changed import note_on_order
from mtrain.training.evaluate import term_records

_log = logging.getLogger(__name__)

_MAX_ROWS = 50
_MAX_MEMORY_EVENTS = 100_000
_NUM_REPORTERS_OF_LOST_RANKS = 2
"""Number of ranks that report a lost rank: the second one does in case the first has died."""


class Life:
    """Event log of a start, for a `with` block; leaving the block records how the start ended."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._log = EventLog(folder.events, rank)
        self._step = self._num_steps = 0
        self._how_to_resume = "the same command resumes"
        self._stop: str | None = None
        self._check: Callable[[], None] = lambda: None

    def __enter__(self) -> Life:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            if self._reports(error):
                text = f"{type(error).__name__}: {error}"
                self._log.write(EventKind.FAILURE, self._step, text, {"exit_code": getattr(error, "exit_code", 1)})
        elif self._stop is not None:
            self._log.write(EventKind.STOP, self._step, self._stop)
        elif self._rank == 0:
            self._log.write(EventKind.FINISH, self._step)

    def started(self, config: Config, environment: Mapping[str, str], check: Callable[[], None]) -> None:
        """Records that this start has claimed the run folder; `check` raises once another one has. On rank 0."""
        self._check, self._num_steps = check, config.train.num_steps
        if config.checkpoint.resume == "never":
            self._how_to_resume = "checkpoint.resume=auto resumes"
        known: dict[str, Fact] = {"num_steps": config.train.num_steps, "name": config.run.name}
        known |= {key: environment[key] for key in ("mtrain", "device", "layout")}
        known |= {"world_size": int(environment["world_size"]), "job": os.environ.get("SLURM_JOB_ID")}
        self._log.write(EventKind.START, 0, facts=known)

    def resumed(self, step: int, reached: int) -> None:
        """Records that training continues after `step`; earlier starts had reached step `reached`, so the steps between
        are repeated."""
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.RESUME, step, facts={"reached": max(reached, step)})

    def stepped(self, step: int) -> None:
        self._step = step

    def saved(self, step: int, seconds: float) -> None:
        """Records that a checkpoint is on disk. On rank 0."""
        self._folder.note_save(seconds)
        self._log.write(EventKind.SAVE, step, facts={"seconds": round(seconds, 3)})

    def alarmed(self, step: int, text: str, facts: Mapping[str, Fact] | None = None) -> None:
        if self._rank == 0:
            self._log.write(EventKind.ALARM, step, text, facts)

    def rolled_back(self, step: int, from_step: int, text: str) -> None:
        """Records that the run has gone back to the checkpoint of `step`, because `from_step` was bad."""
        self._step = step
        if self._rank == 0:
            self._log.write(EventKind.ROLLBACK, step, text, {"from_step": from_step})

    def stopped(self, reason: str) -> None:
        """Records that the run ends early and must be started again, and tells the user how. On rank 0."""
        self._check()
        self._folder.set_requeue(reason)
        self._stop = reason
        saved = max(published_steps(self._folder.checkpoints), default=0)
        step = max(self._step, saved)  # before the model is built only the checkpoints are known
        start = "" if saved == step else f" from step {saved}"  # the last save failed
        _log.info(f"stopped at step {step} of {self._num_steps}; {self._how_to_resume}{start}")

    def _reports(self, error: BaseException) -> bool:
        """Says whether this rank records the error; an error of all ranks is recorded once."""
        if isinstance(error, RunFolderError):  # the folder belongs to another start
            return False
        if isinstance(error, RankLostError):
            return self._rank < _NUM_REPORTERS_OF_LOST_RANKS
        return self._rank == 0 or not (isinstance(error, MtrainError) and error.on_every_rank)


def slow_ranks(beats: Collection[Beat], percent: float) -> dict[int, float]:
    """Finds the ranks more than `percent` slower than the median of their stage: rank -> its time / the median."""
    slow: dict[int, float] = {}
    for stage in {beat.stage for beat in beats}:
        times = {beat.rank: beat.pace_s for beat in beats if beat.stage == stage}
        usual = statistics.median_low(times.values())  # of two ranks the faster one is the reference
        if usual > 0:
            slow |= {rank: seconds / usual for rank, seconds in times.items() if seconds > usual * (1 + percent / 100)}
    return slow


class PaceJudge:
    """Judges ranks over several windows: a rank is slow if it was slow in enough consecutive ones."""

    def __init__(self, percent: float, num_windows: int) -> None:
        self._percent, self._num_windows = percent, num_windows
        self._in_a_row: dict[int, int] = {}

    def add(self, beats: Collection[Beat]) -> dict[int, float]:
        """Adds a window; returns the ranks that count as slow, with this window's ratio to the median."""
        slow = slow_ranks(beats, self._percent)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in slow}
        return {rank: ratio for rank, ratio in slow.items() if self._in_a_row[rank] >= self._num_windows}


class SlowRanks:
    """Detects slow ranks on the first rank, from heartbeats; no collectives."""

    def __init__(self, watch: WatchSection, groups: Groups, heartbeat: Heartbeat, life: Life) -> None:
        self._watch, self._groups, self._heartbeat, self._life = watch, groups, heartbeat, life
        self._judge = PaceJudge(watch.slow_rank_percent, watch.slow_rank_windows)
        self._own_s, self._num_steps, self._window = 0.0, 0, 0
        self._judged = 0
        self._slow: dict[int, float] = {}
        self._reported: set[int] = set()

    def noted(self, record: StepRecord, waited_s: float) -> StepRecord:
        """Counts this rank's step, which waited `waited_s` for others; returns its record with a slow rank, if any."""
        record = replace(record, waited_seconds=waited_s)
        if not self._watch.slow_rank_percent:
            return record
        self._own_s += record.seconds - waited_s
        self._num_steps += 1
        if record.step % self._watch.window_steps == 0:
            self._window = record.step
            self._heartbeat.note_pace(record.step, self._groups.pp_rank, self._own_s / self._num_steps)
            self._own_s, self._num_steps = 0.0, 0
        slow = self._slow
        if not slow:
            return record
        rank = max(slow, key=slow.__getitem__)
        return replace(record, slow_rank=rank, slow_rank_ratio=slow[rank])

    def look(self) -> None:
        """Compares the ranks once all have reported the latest window. In the heartbeat's thread of the first rank."""
        window = self._window
        if self._groups.rank != 0 or window == self._judged:
            return
        of_all = self._heartbeat.of_all()
        beats = [beat for beat in of_all if beat is not None and beat.pace_step == window]
        if len(beats) < len(of_all):
            return
        self._judged = window
        slow = self._judge.add(beats)
        for rank in slow.keys() - self._reported:
            self._reported.add(rank)  # once per start; records continue to name it
            steps = self._watch.slow_rank_windows * self._watch.window_steps
            text = (
                f"rank {rank} is slow: its own work took {slow[rank]:.2f} times the median of its pipeline stage in "
                f"the last {counted(steps, 'step')}, and all other ranks wait for it"
            )
            _log.info(f"warning: {text}")
            self._life.alarmed(window, text, {"slow_rank": rank, "ratio": round(slow[rank], 3)})
        self._slow = slow


class LedgerSink:
    """Writes the ledger entry of each recorded step."""

    def __init__(self, folder: Path, dp_rank: int, next_entry: Callable[[int], StepEntry], start: StartEntry) -> None:
        """Opens the file of this rank. `next_entry` returns the entry of a step, counted from 1."""
        with disk_faults(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        self._next_entry = next_entry
        self._file = AppendedFile(folder / f"dp_{dp_rank:05d}.jsonl", first=to_line(start))

    def write(self, record: Record) -> None:
        """Appends the entry of a step; other records are ignored."""
        if isinstance(record, StepRecord):
            entry = replace(self._next_entry(record.step), skipped=record.skipped is not None)
            self._file.append(record.step, to_line(entry))

    def close(self) -> None:
        """Closes the file; raises MachineError if the disk refused entries until the end."""
        self._file.close()


def open_sinks(run: Run, folder: RunFolder, lock: RunLock, life: Life) -> Sinks:
    """Opens this rank's sinks, removing what an earlier start wrote after the start step. Collective over the world."""
    config, start = run.model.config, run.start_step
    metrics, num_steps = config.metrics, config.train.num_steps
    on_first_rank(lambda: refuse_missing(metrics.trackers))
    ledger = _ledger(run, folder)
    if run.model.groups.rank != 0:
        life.resumed(start, start)
        return Sinks(*ledger)
    life.resumed(start, last_step(folder.metrics))
    console = ConsoleSink(num_steps, start, interval_steps=metrics.console_interval_steps)
    environment = folder.saved_environment() or {}
    tracked = tracked_run(folder.path, metrics.project, config.run, flat_keys(config), environment)
    extras: list[Sink] = [TensorBoardSink(folder.tensorboard, start, _texts(tracked))] if metrics.tensorboard else []
    if start < num_steps:
        extras += [tracker_sink(name, tracked) for name in dict.fromkeys(metrics.trackers)]
    metrics_file = JsonlSink(folder.metrics, start)
    sinks = Sinks(metrics_file, console, *extras, *ledger, check=lock.check_now_and_then)
    if start < num_steps:
        new = [ChangeRecord(**info.model_dump()) for info in run.changes if info.step == start]
        for change in new:
            sinks.write(change)
        unit = "row" if config.steps_count_rows else "sample"
        if (note := note_on_order(new, config.train.global_batch_size, unit)) is not None:
            _log.info(note)
    return sinks


def _texts(run: TrackedRun) -> dict[str, str]:
    config = "\n".join(f"{key}: {value}" for key, value in run.config.items() if not key.startswith("environment."))
    environment = "\n".join(f"{key}: {value}" for key, value in run.config.items() if key.startswith("environment."))
    return {"config": config, "environment": environment, "notes": f"{run.name}\n{run.notes}"}


def _ledger(run: Run, folder: RunFolder) -> list[LedgerSink]:
    """Opens the data ledger on each rank that reads for a replica of the data. Collective over the world."""
    start, loader = run.start_step, run.loader
    if not run.model.config.metrics.data_ledger or start >= run.model.config.train.num_steps:
        return []
    # also the files of ranks that no longer exist; all of them before any is opened
    on_first_rank(lambda: rewind_ledger(folder.ledger, start))
    if loader is None or not run.model.groups.counts_planned:
        return []
    return [LedgerSink(folder.ledger, run.model.groups.dp_rank, loader.next_entry, loader.start_entry(start))]


def record_of(run: Run, done: int, made: StepOutcome, lr: float, seconds: float) -> StepRecord:
    """Returns the record of step `done`, applied or not."""
    config, totals, update = run.model.config, made.totals, made.update
    record = StepRecord(
        step=done,
        loss=0.0,
        denominator=0.0,
        grad_norm=0.0,
        lr=lr,
        tokens=0,
        seconds=seconds,
        tokens_per_second=0.0,
        empty=True,
        skipped=made.refused,
        layout_dependent=config.is_layout_dependent,
        time_s=time.time(),
    )
    if totals is None:
        return record
    grad_norm = 0.0 if update is None else update.grad_norm
    skipped = made.refused
    if skipped is not None:  # the norm of the refused gradient
        grad_norm = math.nan if totals.grad_norm is None else totals.grad_norm
    elif update is not None and update.overflowed:
        skipped = "fp16 overflow"
    counts, tokens = totals.tokens, totals.num_text_tokens
    work = Work(tokens, counts.pairs, counts.window_pairs, counts.outputs, counts.patches, counts.patch_pairs)
    flops = flops_of_step(config.model, work, config.adapter, run.objective.preference is not None)
    sources, device = zip(config.data.source_names, totals.sources), run.model.groups.device
    # per GPU; None on CPUs and on GPUs of unknown peak
    is_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device), config.train.precision) if is_gpu else None
    return replace(
        record,
        loss=totals.loss,
        objective=totals.objective,
        denominator=totals.terms[MAIN_TERM].denominator,
        grad_norm=grad_norm,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        padding_tokens=counts.padding,
        loss_tokens=counts.loss,
        flops=flops,
        terms=term_records(totals.terms),
        diagnostics=totals.diagnostics,
        sources=term_records({name: source_totals for name, source_totals in sources if source_totals.denominator}),
        empty=totals.is_empty,
        skipped=skipped,
        loss_scale=run.model.optimizer.loss_scale() if config.train.precision == "fp16" else None,
        mfu=None if peak is None else mfu(flops, seconds, peak * run.model.groups.layout.world_size),
        memory_bytes=_memory_bytes(device),
    )


def _memory_bytes(device: torch.device) -> int | None:
    """Returns the peak memory on a GPU since the last call, or resident memory on a CPU; None if unknown."""
    if device.type != "cuda":
        try:
            return int(psutil.Process().memory_info().rss)
        except OSError:  # no file descriptor is free: a mere statistic must not end a run
            return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


class StepProfiler:
    """Profiles one rank during a few steps (`metrics.profile_steps`), operation by operation."""

    def __init__(self, metrics: MetricsSection, folder: Path, rank: int, device: torch.device) -> None:
        steps = metrics.profile_steps if rank in metrics.profile_ranks else ()
        self._first, self._last = steps if steps else (0, -1)
        self._folder, self._rank, self._is_cuda = folder, rank, device.type == "cuda"
        self._running: profile | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profiles a step, counted from 1, inside the `with` block; the last chosen step writes the files."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._running is None:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._is_cuda]
            self._running = profile(activities=activities, profile_memory=True, record_shapes=True)
            self._running.start()
            if self._is_cuda:
                torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        yield
        if number == self._last:
            self._finish()

    def close(self) -> None:
        """Writes the profile if the run stopped before the last chosen step."""
        if self._running is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._running is not None
        profiler, self._running = self._running, None
        profiler.stop()
        try:
            self._write(profiler)
        except (OSError, RuntimeError) as fault:  # a full disk costs the profile alone
            _log.warning(f"warning: could not write the profile to {self._folder}: {fault}")
        finally:
            if self._is_cuda:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._folder / f"rank_{self._rank:05d}.steps_{self._first}_to_{self._last}"
        profiler.export_chrome_trace(f"{name}.trace.json.gz")
        order = "self_cuda_time_total" if self._is_cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=_MAX_ROWS, max_name_column_width=100)
        write_atomically(Path(f"{name}.kernels.txt"), table + "\n")
        if self._is_cuda:
            memory: Any = torch.cuda.memory  # without types there
            memory._dump_snapshot(f"{name}.memory.pickle")
