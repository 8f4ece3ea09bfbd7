"""A rank's side of the watchdog, in programs without torch: the start of a run, and what a watchdog leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mtrain.base.heartbeat import Phase, Pulse, beating, read_pulse, tick
from mtrain.watch.judge import Loss, Lost
from mtrain.watch.node import node_folder
from mtrain.watch.stacks import flight_recorder
from mtrain.watch.watchdog import ORDERED
from tests.fault_table import Notice
from tests.paths import ROOT

PROGRAM = """
import os, signal, sys, time
from mtrain.base.environment import RankEnvironment
from mtrain.config import Config
from mtrain.watch.rank import watched
from tests.config.samples import config

start_timeout_s, timeout_s = map(int, sys.argv[3:])
here = config(run__dir=sys.argv[1], train__process_group_timeout_s=timeout_s, watch__start_timeout_s=start_timeout_s)
with watched(here, RankEnvironment.from_environ(os.environ)) as pulse:
    rank = int(os.environ["RANK"])
    print("ready", sorted({"torch", "psutil", "numpy"} & sys.modules.keys()), flush=True)
    exec(sys.argv[2])
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Returns a function that starts two ranks of a launch of their own, which run the same text."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        text: str, num_ranks: int = 2, start_timeout_s: int = 2, timeout_s: int = 2
    ) -> list[subprocess.Popen[str]]:
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
                "MTRAIN_LAUNCH": tmp_path.name,
            }
            given = [str(tmp_path / "run"), text, str(start_timeout_s), str(timeout_s)]
            command = [sys.executable, "-c", PROGRAM, *given]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
        return running

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def folder_of(tmp_path: Path) -> Path:
    return node_folder({"MTRAIN_LAUNCH": tmp_path.name})


def is_soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def watchdogs() -> list[psutil.Process]:
    found = (process for process in psutil.process_iter(["cmdline"]))
    return [one for one in found if (one.info["cmdline"] or [])[1:3] == ["-m", "mtrain.watch.watchdog"]]


@pytest.mark.fault(
    "ranks",
    "SIGSTOP of one of several ranks while programs load",
    happens="the watchdog names it after `train.process_group_timeout_s` and ends the job",
    exit_code=-signal.SIGKILL,
)
@pytest.mark.waits
def test_a_rank_that_is_stopped_while_it_loads_is_named(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path, notice: Notice
) -> None:
    first, second = ranks("if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: time.sleep(0.01)", 2, 60)
    with notice:
        assert second.wait(60) == notice.exit_code
        assert first.wait(60) == -signal.SIGKILL, "it does not notice by itself"
    errors = first.communicate()[1]
    assert "error: rank 1 is stopped, for 2 s, in start" in errors
    # line 1, or line 2 where the watchdog let the rank go on for a moment to write it
    assert re.search(r'File "<string>", line [12] in <module>', errors), "the stack of the stopped rank"
    assert is_soon(lambda: not folder_of(tmp_path).exists())


@pytest.mark.waits
def test_a_rank_that_never_begins_is_named(ranks: Callable[..., list[subprocess.Popen[str]]]) -> None:
    (first,) = ranks("while True: time.sleep(0.01)", 1, 60)
    assert first.wait(60) == -signal.SIGKILL
    assert "error: rank 1 has never begun" in first.communicate()[1]


def test_ranks_that_their_launcher_ends_are_not_lost(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    begun = ranks("while True: time.sleep(0.01)", 2, 60)
    assert is_soon(lambda: len(list(folder_of(tmp_path).glob("rank_*"))) == 2)
    (folder_of(tmp_path) / ORDERED).touch()
    for process in begun:
        process.kill()
    errors = [process.communicate()[1] for process in begun]  # to their end, the watchdog's included
    assert errors == ["", ""]


@pytest.mark.parametrize("while_made", [False, True])
def test_a_rank_that_two_interrupts_end_has_said_so(tmp_path: Path, while_made: bool) -> None:
    """The report exists from the first moment that a watchdog can see; Python's own exits may then be skipped."""
    program = (
        "import os, pathlib, signal, sys\n"
        "from mtrain.base.heartbeat import Pulse\n"
        "from mtrain.base.signals import hold_stop_signals\n"
        "hold_stop_signals()\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "if sys.argv[2] == 'True': sys.addaudithook("
        "lambda event, _: signal.raise_signal(signal.SIGINT) if event == 'os.rename' else None)\n"
        "try:\n"
        "    Pulse(pathlib.Path(sys.argv[1]), 0)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "finally:\n"
        "    os._exit(130)\n"
    )
    path = tmp_path / "rank_00000"
    command = [sys.executable, "-c", program, str(path), str(while_made)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 130
    pulses = [read_pulse(each) for each in (path, *tmp_path.glob(".rank*")) if each.exists()]
    assert [pulse.left_with for pulse in pulses if pulse is not None] == ["KeyboardInterrupt"]


def test_a_rank_without_a_number_is_not_called_minus_one() -> None:
    assert str(Loss(-1, Lost.ABSENT, "", 5.0, True)) == "a rank of this node has never begun, for 5 s"


@pytest.mark.waits
def test_ranks_that_load_for_long_but_live_are_left_alone(ranks: Callable[..., list[subprocess.Popen[str]]]) -> None:
    # a busy machine may keep a live rank from its core for seconds
    begun = ranks("time.sleep(10)", 2, 60, 8)
    assert [process.wait(60) for process in begun] == [0, 0]


def test_a_watchdog_is_light_and_leaves_with_its_ranks(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    begun = ranks("while not os.path.exists(sys.argv[1] + '.end'): time.sleep(0.01)", 2, 60)
    own = [process.pid for process in begun]
    assert is_soon(lambda: any(dog.ppid() in own for dog in watchdogs()))
    assert is_soon(lambda: len(list(folder_of(tmp_path).glob("rank_*"))) == 2)
    (dog,) = (dog for dog in watchdogs() if dog.ppid() in own)
    assert dog.memory_info().rss < 40e6
    assert not any("libtorch" in entry.path or "nvidia" in entry.path for entry in dog.memory_maps())
    (tmp_path / "run.end").touch()
    assert [process.wait(60) for process in begun] == [0, 0]
    assert all(process.stdout is not None and process.stdout.read() == "ready []\n" for process in begun)
    assert is_soon(lambda: not dog.is_running() or dog.status() == psutil.STATUS_ZOMBIE)
    assert is_soon(lambda: not folder_of(tmp_path).exists())


def test_the_flight_recorder_of_nccl_is_switched_on(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    wanted = flight_recorder(folder_of(tmp_path))
    first, _ = ranks(
        f"import json; print(json.dumps({{name: os.environ.get(name) for name in {list(wanted)}}}))", 2, 60
    )
    lines = first.communicate(timeout=600)[0].splitlines()
    assert json.loads(lines[-1]) == wanted
    assert wanted["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert wanted["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].startswith(str(folder_of(tmp_path)))


def test_what_an_ended_watchdog_left_is_swept_up(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    old, fresh = folder_of(tmp_path.with_name("old")), folder_of(tmp_path.with_name("fresh"))
    for folder in (old, fresh):
        folder.mkdir(exist_ok=True)
        (folder / "rank_00000").write_bytes(b"")
    os.utime(old, (0, 0))
    begun = ranks("while not os.path.exists(sys.argv[1] + '.end'): time.sleep(0.01)", 2, 60)
    assert is_soon(lambda: not old.exists())
    (tmp_path / "run.end").touch()
    assert [process.wait(60) for process in begun] == [0, 0]
    assert fresh.exists(), "its ranks may be about to begin"
    (fresh / "rank_00000").unlink()
    fresh.rmdir()


def test_a_pulse_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rank_00003"
    pulse = Pulse(path, 3)
    with beating(pulse):
        pulse.start_number = 7
        pulse.enter("forward_backward", 12)
        pulse.begin_wait(1)
        state = read_pulse(path)
        assert state is not None
        assert (state.pid, state.rank) == (os.getpid(), 3)
        assert (state.start, state.step, state.phase) == (7, 12, Phase.FORWARD_BACKWARD)
        assert state.place == "forward_backward of step 12, waiting in all-reduce 1"
        pulse.end_wait(1)
        before = read_pulse(path)
        tick()
        after = read_pulse(path)
        assert before is not None
        assert after is not None
        assert after.place == "forward_backward of step 12, after all-reduce 1"
        assert after.changed_s > before.changed_s, "a tick is progress"
        pulse.beat()
        beaten = read_pulse(path)
        assert beaten is not None
        assert beaten.changed_s == after.changed_s, "a beat is none"
        assert beaten.written_s > after.written_s
        assert beaten.left_with is None
    left = read_pulse(path)
    assert left is not None
    assert left.left_with == "done"
    path.write_bytes(b"no pulse")
    assert read_pulse(path) is None
