"""One run at a time where flock fails, as on some NFS and Lustre mounts; the kernel refuses it here, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Notice
from tests.paths import ROOT
from tests.training.test_trainer import command, finished, numbers, start, wait_for_step

__all__ = ["command", "start"]

HOLD = """
import sys, time
from pathlib import Path
from mtrain.base.errors import MtrainError
from mtrain.base.log import show_lines
from mtrain.runs.folder import RunFolder
from mtrain.runs.lock import Patience
show_lines()
try:
    patience = Patience(beat_s=0.1, settle_s=float(sys.argv[2]), watch_s=float(sys.argv[3]))
    with RunFolder(Path(sys.argv[1])).locked(patience) as lock:
        print("locked", flush=True)
        sys.stdin.readline()
        lock.check()
        print("still ours", flush=True)
except MtrainError as error:
    print(error.exit_code, error, flush=True)
"""


WITHOUT_FLOCK = """
import errno
from mtrain.__main__ import main
from tests.runs.no_flock import forbid_flock
forbid_flock(errno.ENOLCK)
main()
"""


@contextmanager
def holding(
    folder: Path, error: str = "ENOLCK", settle_s: float = 0.1, watch_s: float = 5.0
) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that takes the folder and keeps it until it reads a line."""
    hold = [sys.executable, "-c", HOLD, str(folder), str(settle_s), str(watch_s)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runs.no_flock", error, *hold],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    """Reads the next line of the process."""
    assert process.stdout is not None
    return process.stdout.readline()


def let_go(process: subprocess.Popen[str]) -> str:
    """Releases the process and returns its last output."""
    return process.communicate("\n", timeout=600)[0]


@pytest.mark.parametrize("error", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_folder_without_locks_is_taken_with_a_warning_and_given_back(tmp_path: Path, error: str) -> None:
    for _ in range(2):  # the second is not kept waiting
        with holding(tmp_path, error) as process:
            assert line(process) == "locked\n"
            output, errors = process.communicate("\n", timeout=600)
            assert output == "still ours\n"
            assert errors.startswith(f"warning: the file system of {tmp_path} has no file locks; ")
            assert errors.count("\n") == 1
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.fault(
    "disk",
    "a second run on one folder, on a file system without locks",
    happens="the mark of the first is seen within seconds; one message names it",
    exit_code=6,
)
def test_a_second_run_is_refused_while_the_first_marks_its_folder(tmp_path: Path, notice: Notice) -> None:
    with holding(tmp_path) as first:
        assert line(first) == "locked\n"
        with notice, holding(tmp_path, watch_s=50.0) as second:  # an active first holder is seen at its first mark
            said = let_go(second).splitlines()
        assert said[-1].startswith(f"{notice.exit_code} run folder {tmp_path} is in use by process ")
        assert let_go(first) == "still ours\n"


@pytest.mark.waits
def test_the_folder_of_a_killed_run_is_taken_after_a_while(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert line(first) == "locked\n"
    with holding(tmp_path) as second:
        assert line(second).startswith("watching for 5 s whether process ")
        assert line(second) == "locked\n"


@pytest.mark.waits
def test_a_run_that_was_stopped_meanwhile_finds_the_other_name(tmp_path: Path) -> None:
    with holding(tmp_path) as first:
        assert line(first) == "locked\n"
        first.send_signal(signal.SIGSTOP)
        with holding(tmp_path) as second:
            assert "watching" in line(second)
            assert line(second) == "locked\n"
            first.send_signal(signal.SIGCONT)
            assert "was taken over by process " in let_go(first)
            assert let_go(second) == "still ours\n"


@pytest.mark.waits
def test_of_two_starts_at_once_one_goes_on(tmp_path: Path) -> None:
    with holding(tmp_path, settle_s=5.0) as first, holding(tmp_path, settle_s=5.0) as second:
        ends = [let_go(process).splitlines()[-1] for process in (first, second)]
    assert sorted(end.startswith("6 run folder ") for end in ends) == [False, True], ends
    assert "still ours" in ends


@pytest.mark.fault(
    "disk",
    "no file locks (ENOLCK, ENOSYS, EOPNOTSUPP: some NFS and Lustre mounts)",
    happens="a warning; the name in the lock file keeps other runs out",
    exit_code=0,
)
def test_a_run_trains_exports_and_goes_on_without_locks(
    command: Callable[..., list[str]], start: Any, tmp_path: Path, notice: Notice
) -> None:
    (program := tmp_path / "without_flock.py").write_text(WITHOUT_FLOCK)

    def without(*changes: str) -> list[str]:
        return [sys.executable, str(program), *command(*changes)[3:]]

    saves = ("checkpoint.interval_steps=1", "checkpoint.export_hf_every_steps=2", "checkpoint.keep_last=1")
    with notice:
        code, _, errors = finished(start(without(*saves)))
    assert code == notice.exit_code, errors
    assert "Traceback" not in errors
    assert errors.count("warning:") == 1, errors
    assert [path.name for path in sorted((tmp_path / "run" / "exports").iterdir())] == [
        f"step_{step:08d}" for step in (2, 4, 6)
    ], "what is to be exported is kept, though nothing can be locked"
    process = start(without(*saves, "train.num_steps=100000"))
    wait_for_step(tmp_path / "run", 8)
    process.send_signal(signal.SIGTERM)
    code, _, errors = finished(process)
    assert code == 0, errors
    assert [step for step, *_ in numbers(tmp_path / "run")][:8] == list(range(1, 9))
