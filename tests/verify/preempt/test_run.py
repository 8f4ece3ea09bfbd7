"""`mtrain verify preempt`: a run that is stopped in every phase passes, and damage that a stop may do is found."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.base.fault_points import REACHED, VARIABLE, InjectedFault
from mtrain.base.heartbeat import Phase
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.hf.configuration import load_config
from mtrain.report.metrics.jsonl import JsonlSink
from mtrain.runs.folder import RunFolder
from mtrain.verify.core.result import PreemptReport
from mtrain.verify.parity import Request
from mtrain.verify.planted.inject import PREEMPT_FAULTS, TESTS
from mtrain.verify.preempt import (
    Process,
    Program,
    Stop,
    StopFailedError,
    run_to_end,
    run_until_stopped,
    verify_preempt,
)
from tests.messages import refuses
from tests.paths import ROOT
from tests.report.metrics.records import step_record
from tests.verify.reports import read_back
from tests.warm import Command, program_environment

CONFIG = """
model:
  {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64, hidden_dropout: 0.1}
data: {kind: mock, seq_length: 16}
layout: {pp: 2}
train: {global_batch_size: 4, num_steps: 100, precision: bf16}
optimizer: {lr: 1.0e-3, warmup_steps: 10}
run: {dir: unused}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return load_config([tmp_path / "run.yaml"], [])


def warm(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
    """Starts the launcher and its ranks without their imports."""
    log.touch()
    return Command(list(command), ROOT, {**program_environment(), **more})


def drill(
    config: Config, max_ranks: int = 2, fault: str | None = None, steps: int = 6, program: Program = warm
) -> PreemptReport:
    request = Request(layouts=None, num_steps=steps, max_ranks=max_ranks, fault=fault, command="mtrain verify preempt")
    return verify_preempt(config, request, lambda line: None, program)


@pytest.mark.parametrize(
    "max_ranks",
    [1, pytest.param(2, marks=pytest.mark.nightly)],  # tests/faults shows that all ranks stop together
)
def test_a_run_is_stopped_in_every_phase_and_is_the_same(config: Config, max_ranks: int) -> None:
    report = drill(config, max_ranks)
    assert report.passed, [(layout.name, layout.error, layout.first_failure()) for layout in report.layouts]
    phases = ["start", "start", "build", "forward_backward", "validation", "save"]
    assert [layout.axes["phase"] for layout in report.layouts] == phases
    assert report.reference.num_ranks == max_ranks
    assert [step.step for step in report.reference.steps] == [1, 2, 3, 4, 5, 6]
    # every step follows one stop, and is compared
    assert sorted(step.step for layout in report.layouts for step in layout.steps) == [1, 2, 3, 4, 5, 6]
    compared = {(one.kind, one.step) for layout in report.layouts for one in layout.deviations}
    assert {("loss", 1), ("grad_norm", 4), ("lr", 2), ("records", 3), ("files", 6)} <= compared
    assert all(layout.seconds > 0 for layout in report.layouts)
    assert read_back(PreemptReport, report.to_json()) == report


FOUND = {"record-lost": "records", "record-repeated": "records", "rate-changed": "lr"}


class StandIn:
    """A launcher whose ranks write the records of a trainer that notices no stop, and compute nothing."""

    def __init__(self, command: Sequence[str], log: Path, more: Mapping[str, str]) -> None:
        log.touch()
        self._child, self.pid = subprocess.Popen(["sleep", "600"]), os.getpid()
        self._config, self._reached = load_config([Path(command[-1])], []), more.get(REACHED)
        self._stop = None if self._reached is None else InjectedFault.parsed(more[VARIABLE])
        self._code: int | None = None
        if self._reached is not None:
            Path(self._reached).touch()

    def _run(self, first: int, last: int) -> None:
        folder = RunFolder(Path(self._config.run.dir))
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        metrics = JsonlSink(folder.metrics, first - 1)
        for step in range(first, last + 1):
            metrics.write(replace(step_record(step, 2 + 1 / step), lr=self._config.optimizer.lr))
        metrics.close()
        (folder.checkpoints / f"step_{last:08d}").mkdir(exist_ok=True)
        text = json.dumps({"files": {"a.distcp": {"blake3": "0"}}})
        (folder.checkpoints / f"step_{last:08d}" / "mtrain.json").write_text(text)

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int, /) -> None:
        self._end(0 if self._stop is None else self._stop.step + 1)
        RunFolder(Path(self._config.run.dir)).requeue_marker.touch()

    def wait(self) -> int:
        return self._end(self._config.train.num_steps) if self._code is None else self._code

    def _end(self, last: int) -> int:
        steps = [int(path.name[5:]) for path in Path(self._config.run.dir).glob("checkpoints/step_*")]
        self._run(max(steps, default=0) + 1, last)
        self.kill()
        self._code = 0
        return 0

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


def repeat_record(metrics: Path, config: Path) -> None:
    """Writes the last record before the stop a second time."""
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines, lines[-1]]))


def change_rate(metrics: Path, config: Path) -> None:
    """Goes on with another learning rate than the run had."""
    before = load_config([config], [])
    optimizer = before.optimizer.model_copy(update={"lr": 1.5 * before.optimizer.lr})
    allowed = before.checkpoint.model_copy(update={"allow_changed": (*before.checkpoint.allow_changed, "optimizer.lr")})
    config.write_text(config_yaml(before.model_copy(update={"optimizer": optimizer, "checkpoint": allowed})))


PLANTS = {"record-repeated": repeat_record, "rate-changed": change_rate}


class Spoiling:
    """Program that does to a run stopped in a step, before its next start, what a faulty trainer would have done."""

    def __init__(self, fault: str, program: Program) -> None:
        self._spoil, self._program, self._was_in_a_step = PLANTS[fault], program, False

    def __call__(self, command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
        config = Path(command[-1])
        if self._was_in_a_step:
            self._spoil(Path(load_config([config], []).run.dir) / "metrics.jsonl", config)
        fault = InjectedFault.parsed(more[VARIABLE]) if VARIABLE in more else None
        self._was_in_a_step = fault is not None and fault.phase == Phase.FORWARD_BACKWARD
        return self._program(command, log, more)


PROGRAMS = [StandIn, pytest.param(warm, marks=pytest.mark.nightly)]  # `warm` starts the real one


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", FOUND)
def test_what_a_stop_may_spoil_is_found(config: Config, fault: str, program: Program) -> None:
    if fault in PLANTS:
        report = drill(config, max_ranks=1, program=Spoiling(fault, program))
    else:
        report = drill(config, max_ranks=1, fault=fault, program=program)
    failed = [layout for layout in report.layouts if not layout.passed]
    assert failed
    found = failed[0].first_failure()
    assert found is None or found.kind == FOUND[fault]
    assert found is not None or (failed[0].error is not None and program is warm)


def test_a_stand_in_passes_where_nothing_is_planted(config: Config) -> None:
    assert drill(config, max_ranks=1, program=StandIn).passed


def test_a_changed_rate_is_one_that_the_run_goes_on_with(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    change_rate(tmp_path / "metrics.jsonl", path)
    changed = load_config([path], [])
    assert changed.optimizer.lr == 1.5 * config.optimizer.lr
    assert "optimizer.lr" in changed.checkpoint.allow_changed, "or the next start would refuse it"


def test_every_fault_has_a_test() -> None:
    assert [fault.name for fault in PREEMPT_FAULTS] + list(PLANTS) == list(FOUND)
    assert TESTS["preempt/test_run.py::test_what_a_stop_may_spoil_is_found"].split() == list(PLANTS)


class Ended:
    """A launcher that has ended by itself."""

    pid = 0

    def __init__(self, code: int) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code

    def wait(self) -> int:
        return self._code

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize(("code", "marker", "fact"), [(137, True, "137"), (0, False, "REQUEUE")])
def test_a_stop_that_loses_the_run_is_said(tmp_path: Path, code: int, marker: bool, fact: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    run_dir.mkdir()

    def program(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
        Path(more[REACHED]).touch()
        log.write_text("what it said\n")
        if marker:
            (run_dir / "REQUEUE").touch()
        return Ended(code)

    with refuses(StopFailedError, fact, "what it said"):
        run_until_stopped(program, ["x"], run_dir, Stop(Phase.SAVE, 1), 0, log)


def test_a_run_that_never_gets_there_is_said(tmp_path: Path) -> None:
    def program(command: Sequence[str], log: Path, more: Mapping[str, str]) -> Process:
        log.write_text("error: no such file\n")
        return Ended(3)

    with refuses(StopFailedError):
        run_until_stopped(program, ["x"], tmp_path / "run", Stop(Phase.SAVE, 1), 0, tmp_path / "log")
    with refuses(StopFailedError):
        run_to_end(program, ["x"], tmp_path / "log")


def test_too_few_steps_are_refused(config: Config) -> None:
    with refuses(ConfigError, "--steps 5"):
        drill(config, steps=5)


def test_a_drill_has_one_layout(config: Config) -> None:
    request = Request(layouts="tp2,pp2", num_steps=6, max_ranks=2, fault=None, command="")
    with refuses(ConfigError):
        verify_preempt(config, request, lambda line: None, warm)
