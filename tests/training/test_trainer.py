"""Whole runs through the command line: what they leave, how they stop, resume and refuse."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrain.base import fault_points
from mtrain.base.environment import git_checkout
from mtrain.base.heartbeat import read_beat
from mtrain.runs.events import read_events
from tests.fault_table import Notice
from tests.pool import Pool
from tests.warm import Command, program_environment

DEADLINE_S = 600
BASE = """
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 48, num_attention_heads: 4, vocab_size: 64, vocab_multiple: 8}
train: {global_batch_size: 4, micro_batch_size: 2, num_steps: 6, precision: fp32}
optimizer: {lr: 1.0e-2, schedule: constant}
data: {kind: mock, seq_length: 16}
metrics: {tensorboard: false}
"""
LOSSES = """
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.pair import LossPair


def doubled(inputs):
    pair = next_token_loss(inputs)
    return LossPair(2 * pair.numerator, pair.denominator)


def not_a_number(inputs):
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator * float("nan"), pair.denominator)


def counted_twice(inputs):
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator, 2 * pair.denominator)
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Builds the command line of a run in `tmp_path/run`."""
    config = tmp_path / "base.yaml"
    config.write_text(BASE)
    (tmp_path / "my_losses.py").write_text(LOSSES)

    def build(*arguments: str, ranks: int = 1, run: str = "run") -> list[str]:
        verb = ["train"] if ranks == 1 else ["launch", "local", "-n", str(ranks)]
        return [sys.executable, "-m", "mtrain", *verb, str(config), f"run.dir={tmp_path / run}", *arguments]

    return build


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Callable[[list[str]], Command]:
    """Starts a command with the repository and `tmp_path` importable, in a process that has imported all it needs."""
    return lambda arguments: Command(arguments, tmp_path, program_environment(tmp_path))


@pytest.fixture
def start_cold(tmp_path: Path) -> Callable[[list[str]], subprocess.Popen[str]]:
    """Starts a command in a new interpreter."""

    def begin(arguments: list[str]) -> subprocess.Popen[str]:
        pipe, environment = subprocess.PIPE, program_environment(tmp_path)
        return subprocess.Popen(arguments, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)

    return begin


def finished(process: subprocess.Popen[str] | Command) -> tuple[int, str, str]:
    """Returns exit code, standard output, standard error."""
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, output, errors


def records(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    """Returns the complete lines of metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def wait_for_step(run: Path, step: int) -> None:
    """Waits until the run has recorded the step."""
    deadline = time.monotonic() + DEADLINE_S
    while not any(record["step"] >= step for record in records(run)):
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.02)


def wait_for_file(path: Path) -> None:
    """Waits until a process has made the file."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody makes {path.name}"
        time.sleep(0.02)


def running_ranks(run: Path, count: int) -> list[psutil.Process]:
    """Returns the processes by rank; each has a heartbeat."""
    beats = [read_beat(run / "heartbeats", rank) for rank in range(count)]
    assert None not in beats
    return [psutil.Process(beat.pid) for beat in beats if beat is not None]


def numbers(run: Path) -> list[tuple[Any, ...]]:
    """Returns the numbers of every step that must not change."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["denominator"]) for r in records(run)]


def test_a_stopped_run_goes_on_bit_for_bit(
    command: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the samples of step 3 are read; that step is finished."""
    assert finished(start(command(run="straight")))[0] == 0
    monkeypatch.setenv(fault_points.VARIABLE, "await_stop rank=0 step=3 phase=data")
    monkeypatch.setenv(fault_points.REACHED, str(tmp_path / "reached"))
    process = start(command())
    wait_for_file(tmp_path / "reached")
    process.send_signal(signal.SIGTERM)
    code, _, errors = finished(process)
    monkeypatch.delenv(fault_points.VARIABLE)
    stopped_at = records(tmp_path / "run")[-1]["step"]
    assert code == 0, errors
    assert stopped_at == 3
    assert (tmp_path / "run" / "REQUEUE").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{stopped_at:08d}"]

    code, output, errors = finished(start(command()))
    assert code == 0, errors
    assert f"step_{stopped_at:08d}" in output
    assert not (tmp_path / "run" / "REQUEUE").exists()
    assert numbers(tmp_path / "run") == numbers(tmp_path / "straight")
    assert len(numbers(tmp_path / "run")) == 6
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [(each.kind, each.step) for each in events] == [
        ("start", 0),
        ("resume", 0),
        ("save", stopped_at),
        ("stop", stopped_at),
        ("start", 0),
        ("resume", stopped_at),
        ("save", 6),
        ("finish", 6),
    ]
    assert events[3].text == f"stopped by a signal after step {stopped_at}"
    assert events[4].facts["num_steps"] == 6
    assert events[5].facts["reached"] == stopped_at


@pytest.mark.fault(
    "signals",
    "SIGHUP (a closed terminal) to one rank during training",
    happens="all ranks finish the same step, save and leave the marker REQUEUE",
    exit_code=0,
)
@pytest.mark.usefixtures("hangup")
def test_a_signal_to_one_rank_stops_all_in_the_same_step(
    command: Any, start: Any, tmp_path: Path, notice: Notice
) -> None:
    process = start(command("train.num_steps=2000", "layout.tp=2", ranks=2))
    wait_for_step(tmp_path / "run", 2)
    ranks = running_ranks(tmp_path / "run", 2)
    with notice:
        ranks[1].send_signal(signal.SIGHUP)
        code, _, errors = finished(process)
    assert code == notice.exit_code, errors
    last = records(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "REQUEUE").read_text() == f"stopped by a signal after step {last}\n"
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "mtrain.json").exists()


@pytest.mark.nightly  # the day shows it by a teacher in test_terms_run.py and by the first validation below
def test_layouts_log_the_same_losses_and_denominators(command: Any, start: Any, tmp_path: Path) -> None:
    options = ["valid.at_start=true", "valid.at_end=true", "valid.max_samples=7"]
    assert finished(start(command(*options, run="one")))[0] == 0
    code, _, errors = finished(start(command(*options, "layout.tp=2", "layout.sp=true", ranks=2, run="two")))
    assert code == 0, errors
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert [r[4] for r in one] == [r[4] for r in two]
    assert [r[1] for r in two] == pytest.approx([r[1] for r in one], rel=1e-5)
    assert [r[2] for r in two] == pytest.approx([r[2] for r in one], rel=1e-5)
    valid_one, valid_two = (records(tmp_path / run, "valid") for run in ("one", "two"))
    assert [(r["step"], r["samples"], r["denominator"]) for r in valid_one] == [(0, 7, 112.0), (6, 7, 112.0)]
    assert [r["valid_loss"] for r in valid_two] == pytest.approx([r["valid_loss"] for r in valid_one], rel=1e-5)


def test_a_run_folder_tells_what_the_run_ran_on_but_not_where(command: Any, start: Any, tmp_path: Path) -> None:
    assert finished(start(command("train.num_steps=1")))[0] == 0
    text = (tmp_path / "run" / "environment.json").read_text()
    reported = json.loads(text)
    assert reported.keys() >= {"mtrain", "python", "torch", "megatron-core", "numpy", "device", "layout", "world_size"}
    checkout = git_checkout()
    assert checkout is not None
    assert reported["commit"].startswith(checkout.commit)
    assert reported.keys() >= {name for name in ("triton", "apex") if find_spec(name)}
    assert (reported["device"], reported["layout"], reported["world_size"]) == ("cpu", "tp1-pp1-cp1-dp1", "1")
    assert socket.gethostname() not in text


def test_a_users_loss_plugs_in_by_name(command: Any, start: Any, tmp_path: Path) -> None:
    assert finished(start(command("train.num_steps=1", run="plain")))[0] == 0
    assert finished(start(command("train.num_steps=1", "loss.function=my_losses:doubled", run="mine")))[0] == 0
    assert records(tmp_path / "mine")[0]["loss"] == pytest.approx(2 * records(tmp_path / "plain")[0]["loss"], rel=1e-6)


def test_a_run_starts_from_the_weights_of_another(command: Any, start: Any, tmp_path: Path) -> None:
    short = ["train.num_steps=1", "valid.max_samples=7"]
    assert finished(start(command("valid.at_end=true", *short, run="first")))[0] == 0
    arguments = [f"checkpoint.initialize_from={tmp_path / 'first'}", "layout.cp=2", "valid.at_start=true", *short]
    code, _, errors = finished(start(command(*arguments, ranks=2, run="second")))
    assert code == 0, errors
    ended, began = records(tmp_path / "first", "valid")[-1], records(tmp_path / "second", "valid")[0]
    manifest = tmp_path / "first" / "checkpoints" / "step_00000001" / "mtrain.json"
    assert json.loads(manifest.read_text())["valid_loss"] == ended["valid_loss"]
    assert (began["step"], began["samples"], began["denominator"]) == (0, 7, 112.0)
    assert began["valid_loss"] == pytest.approx(ended["valid_loss"], rel=1e-5)
    assert records(tmp_path / "second")[0]["step"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train.num_stps=3"], 2, ["train.num_stps", "num_steps"]),
        (["layout.tp=3"], 2, ["num_attention_heads=4", "layout.tp=3"]),
        (["loss.function=my_losses:halved"], 2, ["my_losses", "halved"]),
        (["data.kind=indexed", "data.train=[{path: nowhere/corpus}]"], 3, ["nowhere/corpus"]),
        (["checkpoint.initialize_from=nowhere"], 3, ["nowhere"]),
        (
            ["loss.function=my_losses:not_a_number"],
            4,
            ["step 1: ", "main", "nan", "no good checkpoint is left to go back to"],
        ),
        (["loss.function=my_losses:counted_twice"], 4, ["main", "128.0", "64.0"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_faults_have_one_message_and_their_exit_code(
    command: Any, start: Any, arguments: list[str], code: int, words: list[str]
) -> None:
    found, _, errors = finished(start(command(*arguments)))
    assert found == code, errors
    assert "Traceback" not in errors
    assert errors.count("error:") == 1
    assert all(word in errors for word in words), errors


def test_a_fault_on_all_ranks_is_reported_once(command: Any, start: Any, tmp_path: Path) -> None:
    code, output, errors = finished(start(command("loss.function=my_losses:not_a_number", "layout.cp=2", ranks=2)))
    assert code == 4
    assert (output + errors).count("error:") == 1
    assert "Traceback" not in output + errors
    (failure,) = (event for event in read_events(tmp_path / "run" / "events.jsonl") if event.kind == "failure")
    assert failure.text.removeprefix("NumericError: ") in errors
    assert failure.facts["exit_code"] == 4


@pytest.mark.fault(
    "disk",
    "a second run on one folder",
    happens="one message names the first, which goes on",
    exit_code=6,
)
def test_a_second_run_in_one_folder_is_refused(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    first = start(command("train.num_steps=2000"))
    wait_for_step(tmp_path / "run", 1)
    with notice:
        code, _, errors = finished(start(command()))
    first.send_signal(signal.SIGTERM)
    assert finished(first)[0] == 0
    assert code == notice.exit_code
    assert str(first.pid) in errors
    assert "Traceback" not in errors


def test_a_folder_of_another_configuration_is_refused(command: Any, start: Any) -> None:
    assert finished(start(command("train.num_steps=1")))[0] == 0
    code, _, errors = finished(start(command("train.num_steps=1", "optimizer.lr=0.5")))
    assert code == 6
    assert "optimizer.lr" in errors


def test_the_resolved_configuration_repeats_the_run(command: Any, start: Any, tmp_path: Path) -> None:
    assert finished(start(command("train.seed=7", "train.num_steps=2")))[0] == 0
    saved = str(tmp_path / "run" / "config.yaml")
    repeat = [sys.executable, "-m", "mtrain", "train", saved, f"run.dir={tmp_path / 'again'}"]
    assert finished(start(repeat))[0] == 0
    assert numbers(tmp_path / "again") == numbers(tmp_path / "run")


@pytest.mark.fault(
    "ranks",
    "kill -9 of a rank in a step",
    happens="the launcher names rank, signal, phase and step; the others end",
    exit_code=5,
)
def test_a_killed_rank_ends_the_run_with_its_name(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    process = start(command("train.num_steps=2000", "train.process_group_timeout_s=20", "layout.tp=2", ranks=2))
    wait_for_step(tmp_path / "run", 1)
    ranks = running_ranks(tmp_path / "run", 2)
    while (beat := read_beat(tmp_path / "run" / "heartbeats", 1)) is None or beat.step == 0:
        time.sleep(0.02)
    with notice:
        ranks[1].kill()
        code, output, errors = finished(process)
    assert code == notice.exit_code
    # it may have died in a collective, which is then named, too
    said = r"rank 1 was killed by SIGKILL \(last seen in \w+ of step \d+(, waiting in [\w-]+ \d+)?\)"
    assert re.search(said, errors), errors
    assert "error: rank 1" in errors
    assert errors.count("error:") == 1, "rank 0, which lost its peer, is a consequence"
    reported = (tmp_path / "run" / "failures" / "start_00001" / "rank_00000.json").read_text()
    lost = r"rank 0 lost the connection to another rank; rank 1: silent for .* of step \d+(, waiting in [\w-]+ \d+)? \("
    assert re.search(lost, reported), reported
    assert "Traceback" not in output + errors
    assert not any(child.is_running() for child in ranks)
    last = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert (last.kind, last.rank) == ("failure", 0)
    assert last.text.startswith("RankLostError: rank 0 lost the connection to another rank; rank 1: silent for ")
