"""`mtrain status`: what it reads from run folders that are being written, damaged, old or many, and how it looks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from mtrain.base.errors import DataError
from mtrain.report.metrics.shown import as_line, step_numbers
from mtrain.report.monitor.status import RunState, find_runs, read_status
from mtrain.report.monitor.table import status_view
from mtrain.runs.events import EventKind
from mtrain.runs.failure import failure_of, record_failure, summary
from mtrain.runs.goodput import RunStart, new_number, write_start
from tests.compatibility.test_runs_of_0_1_0 import ARCHIVE
from tests.messages import refuses
from tests.report.metrics.records import step_record
from tests.report.monitor.folders import append, beats, started, timed
from tests.warm import completed, program_environment


def text(*runs: Path) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_view([read_status(run) for run in runs], width=None))
    return capture.get()


def test_a_running_run_shows_its_numbers_by_the_names_of_the_console(tmp_path: Path) -> None:
    log = started(tmp_path)
    beats(tmp_path, 0)
    beats(tmp_path, 1, memory_bytes=3 * 2**30)
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    log.write(EventKind.SAVE, 3, facts={"seconds": 0.5})
    log.write(EventKind.ALARM, 4, "rank 1 is slow")
    found = read_status(tmp_path)
    assert (found.standing.state, found.step, found.num_steps) == (RunState.RUNNING, 4, 10)
    assert found.eta_s == pytest.approx(3.0, abs=0.1), "6 steps of half a second"
    assert (found.num_beating, found.world_size, found.memory_bytes) == (2, 2, 3 * 2**30)
    assert found.last_checkpoint == 3
    shown = text(tmp_path)
    assert found.last is not None
    for part in (as_line(step_numbers(found.last)), "first try", "step       4/10  eta 0:00:03", "2 of 2 beat"):
        assert part in shown
    for part in ("step 4  valid_loss 2.7500", "3.0 GiB on the rank that needs most", "checkpoint step 3, 0:00:0"):
        assert part in shown
    assert "alarm      step 4: rank 1 is slow" in shown


def test_the_goodput_so_far_and_the_summary_of_a_failure_are_shown(tmp_path: Path) -> None:
    log = started(tmp_path)
    assert "goodput  " not in text(tmp_path)
    number = new_number(tmp_path / "starts")
    start = RunStart(number, 1000.0, 1100.0, "here", None, 2, 0, 4, trained_s=80.0, lost_steps=3, lost_s=5)
    write_start(tmp_path / "starts", start)
    share = "80.0%: 80.0 s in steps that count, of 100.0 s (lost steps 5.0 s, other 15.0 s); restarts 0, lost steps 3"
    assert f"goodput    {share}" in text(tmp_path)
    failure = failure_of(DataError("no file x.jsonl"), 1, 1, "build, step 0")
    record_failure(tmp_path, failure)
    log.write(EventKind.FAILURE, 4, "DataError: no file x.jsonl", {"exit_code": 3})
    shown = text(tmp_path)
    for line in summary(failure, tmp_path).splitlines():
        assert line[:190] in shown
    assert "class: data (exit code 3), rank 1" in shown
    found = json.loads(json.dumps(read_status(tmp_path).as_json()))
    assert (found["goodput"]["fraction"], found["goodput"]["lost_steps"]) == (0.8, 3)
    assert (found["failure"]["kind"], found["failure"]["exit_code"]) == ("data", 3)


def test_many_runs_are_rows(tmp_path: Path) -> None:
    for name in ("a", "b"):
        started(tmp_path / name, name=f"run {name}").write(EventKind.FAILURE, 4, "DataError: no file")
    beats(tmp_path / "a", 0)
    heading, *rows = text(tmp_path / "a", tmp_path / "b").splitlines()
    assert heading.split() == [
        "run",
        "state",
        "step",
        "eta",
        "loss",
        "valid_loss",
        "tokens/s",
        "memory",
        "ranks",
        "checkpoint",
        "alarms",
    ]
    assert [" ".join(row.split()) for row in rows] == [
        "run a failed: rank 0: DataError: no file 4/10 2.5000 2.7500 2,048 1.0 GiB",
        "run b failed: rank 0: DataError: no file 4/10 2.5000 2.7500 2,048 1.0 GiB",
    ]


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    started(tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    old = [json.loads(line) | {"time_s": time.time() - 600} for line in lines]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    beats(tmp_path, 0)
    beats(tmp_path, 1, ago_s=100)
    assert "1 of 2 beat; silent: rank 1" in text(tmp_path)
    beats(tmp_path, 0, ago_s=90)
    assert "silent since " in text(tmp_path)
    assert "0:01:30 ago" in text(tmp_path)


def test_files_that_are_being_written_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    started(tmp_path, steps=7)
    beats(tmp_path, 0)
    metrics = tmp_path / "metrics.jsonl"
    whole = metrics.read_bytes()
    for size in (len(whole) - 3, 400, 0):  # within the validation, within the first step, nothing yet
        metrics.write_bytes(whole[:size])
        found = read_status(tmp_path)
        assert found.step == (7 if size > 400 else 0)
        assert "first try" in text(tmp_path)
    metrics.write_bytes(b"\xff\xfe\n" + whole + b'{"kind": "step"}\n\n{')
    assert read_status(tmp_path).step == 7
    for name in ("heartbeats/rank_00000.json", "heartbeats/rank_00001.json", "config.yaml", "REQUEUE"):
        (tmp_path / name).write_bytes(b'{"rank": \xff')
    assert read_status(tmp_path).step == 7
    (tmp_path / "events.jsonl").write_bytes(b"{")
    assert read_status(tmp_path).step == 7


def test_of_a_long_run_the_end_is_read(tmp_path: Path) -> None:
    started(tmp_path, num_steps=100_000)
    append(tmp_path, [timed(step) for step in range(5, 2000)])
    assert (tmp_path / "metrics.jsonl").stat().st_size > 2**19
    found = read_status(tmp_path)
    assert found.step == 1999
    assert found.eta_s == pytest.approx(0.5 * (100_000 - 1999), rel=1e-3)


def test_numbers_that_are_none_stay_json(tmp_path: Path) -> None:
    started(tmp_path)
    append(tmp_path, [step_record(5, float("nan"))])
    reported = json.loads(json.dumps(read_status(tmp_path).as_json(), allow_nan=False))
    assert reported["last_step"]["loss"] == "NaN"


@pytest.mark.parametrize("name", ["dense", "mla"])
def test_a_run_of_0_1_0_has_a_status(tmp_path: Path, name: str) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    found = read_status(tmp_path / name)
    assert (found.step, found.num_steps, found.last_checkpoint) == (8, 8, 4)
    assert found.standing.state is RunState.FINISHED
    assert f"{name}  {tmp_path / name}" in text(tmp_path / name)


def test_runs_are_found_in_folders_and_by_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [tmp_path / "x" / name for name in ("a", "b1", "b2")]
    for run in runs:
        started(run)
    (tmp_path / "x" / "empty").mkdir()
    assert find_runs([str(tmp_path)]) == runs
    assert find_runs([str(tmp_path / "x" / "b*")]) == runs[1:]
    assert find_runs([str(runs[2]), str(tmp_path / "x")]) == [runs[2], *runs[:2]], "each once"
    monkeypatch.chdir(tmp_path)
    assert find_runs(["x/b?"]) == [Path("x/b1"), Path("x/b2")]
    for nothing in ("x/empty", "x/c*", "nowhere"):
        with refuses(DataError):
            find_runs([nothing])


def test_the_verb_answers_without_torch_and_in_json(tmp_path: Path) -> None:
    started(tmp_path / "a").write(EventKind.FINISH, 4)
    program = "import sys; from mtrain.__main__ import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, "status", str(tmp_path), "--json"]
    done = subprocess.run(command, env=program_environment(), capture_output=True, text=True, check=True)
    (reported,) = json.loads(done.stdout)
    assert (reported["state"], reported["step"], reported["name"]) == ("finished", 4, "first try")
    assert {"torch", "numpy", "megatron", "matplotlib", "yaml", "mtrain.config"}.isdisjoint(done.stderr.split())


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = completed([sys.executable, "-m", "mtrain", "status", tmp_path])
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {tmp_path} is not a run folder")


def test_watching_shows_what_is_new_until_it_is_interrupted(tmp_path: Path) -> None:
    started(tmp_path)
    command = [sys.executable, "-m", "mtrain", "status", str(tmp_path), "--json", "--watch", "--interval", "0.1"]
    # Ctrl-C as it is in a terminal, also where these tests run under nohup
    watching = subprocess.Popen(
        command,
        env=program_environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())[0]["step"] == 4
    append(tmp_path, [timed(5)])
    while json.loads(watching.stdout.readline())[0]["step"] != 5:
        pass
    os.kill(watching.pid, signal.SIGINT)
    assert watching.wait(timeout=600) == 128 + signal.SIGINT
