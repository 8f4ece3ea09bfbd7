"""Check `mtrain verify preempt`: stops a small copy of the run with a signal, in one phase after another.

The real launcher starts one run repeatedly; each start is stopped in another phase, and the last one runs to the end.
Then records and files of the last checkpoint must equal those of an uninterrupted run bit for bit.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from mtrain.base.errors import ConfigError, UnfinishedError
from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.base.spelling import counted
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.config.schema.data import AnyData, MockSection
from mtrain.report.metrics.record import StepRecord
from mtrain.runs.folder import RunFolder
from mtrain.verify.core.layouts import DerivedTrials, Prepared, Trial, parse_trials, prepared
from mtrain.verify.core.ranks import failure
from mtrain.verify.core.result import Deviation, LayoutResult, PreemptReport, summary
from mtrain.verify.core.samples import with_loss_tokens
from mtrain.verify.core.shrink import (
    FEW_SAMPLES,
    Shrunk,
    has_valid_files,
    reads_files,
    replay_notes,
    small,
    small_schedule,
)
from mtrain.verify.parity import Progress, Request, device_for
from mtrain.verify.planted.inject import PREEMPT_FAULTS, chosen
from mtrain.verify.resume.compare import recorded, records_of, step_values

SIGNAL = signal.SIGUSR1
_POLL_S = 0.02
_LOG_LINES = 15


@dataclass(frozen=True)
class Stop:
    """Phase and step of the ranks at the signal."""

    phase: Phase | None
    """None: while programs load."""
    step: int
    """Step number; 0 before the first."""

    @property
    def name(self) -> str:
        """Returns the stop in words."""
        if self.phase is None:
            return "while programs load"
        return f"in {self.phase}" + (f" of step {self.step}" if self.step else "")


class Process(Protocol):
    """Running launcher; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Program = Callable[[Sequence[str], Path, Mapping[str, str]], Process]
"""Function that starts a command, appends its output to a file, and adds variables to the environment."""


def new_process(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
    """Starts a separate process, as a user would."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


class StopFailedError(UnfinishedError):
    """A stopped run did not stop as it must; a note holds the end of its log."""


def run_to_end(program: Program, command: Sequence[str], log: Path) -> None:
    """Starts the run and waits for its end; `log` gets all output. Raises StopFailedError unless it ends with 0."""
    with _started(program(command, log, {})) as process:
        code = process.wait()
    _require(code == 0, f"the run ended with exit code {code}", log)


def run_until_stopped(
    program: Program, command: Sequence[str], run_dir: Path, stop: Stop, last_rank: int, log: Path
) -> float:
    """Starts the run and asks it to stop; returns the seconds from the signal to the end of the launcher.

    Only `last_rank` must have reached the phase at the signal. Raises StopFailedError if the run did not reach it, did
    not end with 0, or left no marker.
    """
    reached = run_dir.parent / "reached"
    reached.unlink(missing_ok=True)
    environment = {}
    if stop.phase is not None:
        fault = InjectedFault("await_stop", rank=last_rank, step=stop.step, phase=stop.phase)
        environment = {VARIABLE: str(fault), REACHED: str(reached)}
    with _started(program(command, log, environment)) as process:
        # a launcher that has started ranks has installed its signal handlers
        while not (reached.exists() if stop.phase is not None else psutil.Process(process.pid).children()):
            _require(process.poll() is None, f"the run ended with {process.poll()} before it got that far", log)
            time.sleep(_POLL_S)
        process.send_signal(SIGNAL)
        sent = time.monotonic()
        code = process.wait()
        seconds = time.monotonic() - sent
    _require(code == 0, f"a run that was asked to stop ended with exit code {code} instead of 0", log)
    _require(RunFolder(run_dir).requeue_marker.exists(), "a run that was asked to stop left no REQUEUE marker", log)
    return seconds


@contextlib.contextmanager
def _started(process: Process) -> Iterator[Process]:
    """Yields the launcher; kills it, and so its ranks, if it is still running at the end."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def launcher(config: Path, num_ranks: int) -> list[str]:
    """Returns the command that starts a configuration here."""
    return [sys.executable, "-m", "mtrain", "launch", "local", "--num-ranks", str(num_ranks), str(config)]


def _require(is_met: bool, text: str, log: Path) -> None:
    if not is_met:
        tail = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        last_line = next((line for line in reversed(tail) if line.strip()), None)
        failed = StopFailedError(text if last_line is None else f"{text}; its log ends with: {last_line}")
        failed.add_note("\n".join(tail))
        raise failed


LEAST_STEPS = 6
"""A stop during validation or a save takes effect after the next step, which must not be the last."""
_VALID_SAMPLES = 4


def verify_preempt(
    config: Config, request: Request, progress: Progress, program: Program = new_process
) -> PreemptReport:
    """Runs the check; see `verify_parity`. `program` starts the launcher."""
    if request.num_steps < LEAST_STEPS:
        raise ConfigError(f"--steps {request.num_steps} is too few to stop in each phase; give {LEAST_STEPS} or more")
    device, max_ranks = device_for(config.train, request.max_ranks)
    shrunk, base = small_run(config, request, max_ranks)
    notes = replay_notes(config.data, progress)
    if request.fault is not None:
        chosen(request.fault, base.config, (), PREEMPT_FAULTS)
    with tempfile.TemporaryDirectory(prefix="mtrain-preempt-") as folder:
        drill = Drill(base, Path(folder), request, program)
        results = drill.run(progress)
    samples = "the run's own data" if shrunk.reads_files else "random tokens"
    return PreemptReport(
        **request.origin(device),
        config=base.config.model_dump(mode="json"),
        changes=(*shrunk.changes, *notes),
        data=f"{counted(request.num_steps, 'step')} of {samples}",
        num_steps=request.num_steps,
        tolerances=(),
        tensors=(),
        reference=drill.reference,
        layouts=tuple(results),
    )


def small_run(config: Config, request: Request, max_ranks: int) -> tuple[Shrunk, Prepared]:
    """Returns the small configuration, with the user's precision, dropout, schedule and vocabulary, and its layout."""
    trial = DerivedTrials(config, max_ranks).full()
    if request.layouts is not None:
        named = parse_trials(request.layouts, config.layout, max_ranks)
        if len(named) != 1:
            raise ConfigError(f"--layouts names {counted(len(named), 'layout')}, but a drill uses one; name one")
        (trial,) = named
    steps = request.num_steps
    overrides: dict[str, dict[str, Any]] = {
        "train": {"num_steps": steps},
        "optimizer": small_schedule(config.optimizer, min(config.optimizer.warmup_steps, 1), 1),
        "checkpoint": {"interval_steps": steps - 2, "async_save": config.checkpoint.async_save},
        "metrics": {"tensorboard": False},
    }
    if _can_validate(config.data):
        overrides["valid"] = {"interval_steps": steps - 4, "max_samples": _VALID_SAMPLES}
    shrunk = with_loss_tokens(lambda length: _with_own_data(config, trial, length, overrides), config)
    return shrunk, prepared(trial, shrunk.config)


def _with_own_data(config: Config, trial: Trial, length: int, overrides: dict[str, dict[str, Any]]) -> Shrunk:
    """Shrinks everything but the vocabulary, because real ranks do not take token ids modulo a smaller one."""
    data_overrides: dict[str, dict[str, Any]] = {}
    if reads_files(config.data) and not isinstance(config.data, MockSection):
        data_overrides["model"] = {"vocab_size": config.model.vocab_size}
        data_overrides["data"] = {"valid": config.data.model_dump()["valid"] if has_valid_files(config.data) else ()}
    return small(config, [trial], length, overrides | data_overrides, FEW_SAMPLES, reads_images=True)


def _can_validate(data: AnyData) -> bool:
    if isinstance(data, MockSection):
        return True
    is_split = data.split is not None and data.split[1] > 0
    return is_split or (bool(data.valid) and (not reads_files(data) or has_valid_files(data)))


def stops(config: Config) -> Iterator[Stop]:
    """Yields the stops of a run in order of time."""
    steps = config.train.num_steps
    yield Stop(None, 0)
    yield Stop(Phase.START, 0)
    yield Stop(Phase.BUILD, 0)
    yield Stop(Phase.FORWARD_BACKWARD, 1)
    if config.valid.interval_steps:
        yield Stop(Phase.VALIDATION, config.valid.interval_steps)
    yield Stop(Phase.SAVE, steps - 2)


@dataclass(frozen=True)
class _Done:
    stop: Stop
    seconds: float
    last_step: int
    """Newest recorded step after the ranks ended."""
    failed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a `LayoutResult` that say why the run was lost."""


class Drill:
    """Makes one uninterrupted run, and one that is stopped repeatedly."""

    def __init__(self, base: Prepared, folder: Path, request: Request, program: Program) -> None:
        """Starts nothing; `folder` must be empty."""
        self._base, self._folder, self._fault, self._program = base, folder, request.fault, program
        self._num_ranks, self._last_failure = base.layout.world_size, dict[str, Any]()

    def run(self, progress: Progress) -> list[LayoutResult]:
        """Makes all stops; returns the result of each, with the deviations of the steps after it."""
        run_to_end(self._program, launcher(self._config("straight"), self._num_ranks), self._folder / "straight.log")
        expected = records_of(self._folder / "straight")
        values = tuple(map(step_values, expected))
        self.reference = LayoutResult("never stopped", {}, self._num_ranks, 0.0, values, values)
        results = self._results(list(self._starts()), expected)
        for result in results:
            progress(summary(result))
        return results

    def _starts(self) -> Iterator[_Done]:
        """Makes every start, including the last, which is not stopped; yields the outcomes of the stopped ones."""
        config, run_dir = self._config("stopped"), self._folder / "stopped"
        log = self._folder / "stopped.log"
        failed, lost = None, dict[str, Any]()
        for stop in stops(self._base.config):
            if failed is not None:
                error = f"not tried: the run was already lost {failed.name}"
                yield _Done(stop, 0.0, 0, {**lost, "trace": None, "error": error})
                continue
            command = launcher(config, self._num_ranks)
            try:
                seconds = run_until_stopped(self._program, command, run_dir, stop, self._num_ranks - 1, log)
            except StopFailedError as fault:
                failed, lost = stop, failure(fault)
                yield _Done(stop, 0.0, 0, lost)
                continue
            if self._fault is not None and stop.phase is Phase.FORWARD_BACKWARD:
                lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
                (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))
            # the run may have stopped before its first step
            records = records_of(run_dir) if (run_dir / "metrics.jsonl").exists() else []
            yield _Done(stop, seconds, max((record.step for record in records), default=0))
        if failed is None:
            try:
                run_to_end(self._program, launcher(config, self._num_ranks), log)
            except StopFailedError as fault:
                self._last_failure = failure(fault)

    def _results(self, done: Sequence[_Done], expected: Sequence[StepRecord]) -> list[LayoutResult]:
        """Returns the results of the stops; each owns the steps up to the next stop."""
        records = records_of(self._folder / "stopped")
        deviations = list(recorded(records, expected))
        if not self._last_failure and not done[-1].failed:
            deviations += self._files()
        results = []
        for start, following in zip(done, [*done[1:], None], strict=True):
            is_last, is_first = following is None, start is done[0]
            last_step = self._base.config.train.num_steps if following is None else following.last_step
            steps = range(0 if is_first else start.last_step + 1, last_step + 1)
            results.append(
                LayoutResult(
                    start.stop.name,
                    {"phase": "start" if start.stop.phase is None else str(start.stop.phase)},
                    self._num_ranks,
                    start.seconds,
                    steps=tuple(step_values(record) for record in records if record.step in steps),
                    expected=tuple(step_values(record) for record in expected if record.step in steps),
                    deviations=() if start.failed else tuple(one for one in deviations if one.step in steps),
                    **(start.failed or (self._last_failure if is_last else {})),
                )
            )
        return results

    def _files(self) -> Iterator[Deviation]:
        """Compares the files of the last checkpoint (weights, optimizer, random states) by digest."""
        last = self._base.config.train.num_steps
        stopped, straight = (_digests(self._folder / run, last) for run in ("stopped", "straight"))
        for name in sorted(stopped.keys() | straight.keys()):
            yield Deviation("files", name, last, float(stopped.get(name) != straight.get(name)), 0.0)

    def _config(self, run: str) -> Path:
        config = self._base.config
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(self._folder / run)})})
        path = self._folder / f"{run}.yaml"
        path.write_text(config_yaml(config))
        return path


def _digests(run_dir: Path, step: int) -> dict[str, str]:
    folder = RunFolder(run_dir).checkpoints / f"step_{step:08d}"
    files = json.loads((folder / "mtrain.json").read_text())["files"]
    return {name: entry["blake3"] for name, entry in files.items() if name.endswith(".distcp")}
