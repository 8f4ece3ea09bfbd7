"""Ranks that are stopped or silent: the launcher ends them, reports which, and leaves working ones alone."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.heartbeat import read_beat
from mtrain.base.signals import StopSignal
from mtrain.launch.local import run_ranks
from mtrain.launch.watch import Heartbeats, Rank, RankWatch, exit_code_of
from tests.fault_table import Notice
from tests.launch.test_local import launcher, program, wait_for_both

__all__ = ["program"]

READY = """
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
tell(f'ready{rank}', os.getpid())
while not received: time.sleep(0.01)
"""
BEATING = """
from mtrain.base.heartbeat import Heartbeat, Phase
with Heartbeat(here / 'heartbeats', rank, 1, 1.0) as heartbeat:
    heartbeat.enter(Phase.SAVE, 7)
    time.sleep(0.5)
"""


@pytest.mark.fault(
    "signals",
    "SIGTERM while a rank is stopped by SIGSTOP",
    happens="after a grace of 10 s the launcher ends all ranks and names the stopped one",
    exit_code=5,
)
@pytest.mark.parametrize("stopped", [[1], pytest.param([0, 1], marks=pytest.mark.nightly)], ids=["one", "all"])
def test_stopped_ranks_are_ended_after_the_grace(
    program: Callable[[str], Path], tmp_path: Path, stopped: list[int], notice: Notice
) -> None:
    with launcher(program(READY), 2, grace_s=0.5) as process:
        wait_for_both("ready", tmp_path, process)
        pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
        for rank in stopped:
            psutil.Process(pids[rank]).suspend()
        with notice:
            process.send_signal(signal.SIGTERM)
            code = process.wait(20)
        _, errors = process.communicate()
    assert code == notice.exit_code
    assert f"rank {stopped[0]} is stopped and has not answered SIGTERM within 0.5 s" in errors
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_is_stopped_for_a_moment_may_still_save(program: Callable[[str], Path], tmp_path: Path) -> None:
    with launcher(program(READY), 2, grace_s=10) as process:
        wait_for_both("ready", tmp_path, process)
        rank = psutil.Process(int((tmp_path / "ready1").read_text()))
        rank.suspend()
        process.send_signal(signal.SIGTERM)
        time.sleep(1)  # so that the launcher has seen it
        rank.resume()
        assert process.wait(20) == 0


@pytest.mark.fault(
    "ranks",
    "a lost rank under NCCL, which aborts (SIGABRT) the ranks that miss it",
    happens="the launcher names the lost rank, not those that were aborted, and leaves with the code of a lost rank",
    exit_code=5,
)
@pytest.mark.parametrize(
    ("ends", "first", "code", "cause"),
    [
        (["kill -ABRT $$", "kill -KILL $$", "kill -ABRT $$"], 1, 5, "was killed by SIGKILL"),
        (["kill -ABRT $$", "exit 5", "kill -ABRT $$"], 0, 5, "was killed by SIGABRT, as NCCL ends a rank"),
        (["exit 1", "kill -ABRT $$", "exit 3"], 2, 3, "failed with exit code 3"),
        (["exit 5", "exit 4", "kill -SEGV $$"], 2, 5, "was killed by SIGSEGV"),
    ],
)
def test_ranks_that_nccl_aborts_do_not_hide_the_one_that_they_miss(
    ends: list[str], first: int, code: int, cause: str, notice: Notice
) -> None:
    ranks = [Rank(number, subprocess.Popen(["sh", "-c", end]), None, 0) for number, end in enumerate(ends)]
    for rank in ranks:
        rank.process.wait()  # the launcher sees all of them at once
    with StopSignal() as stop, notice:
        failure = RankWatch(ranks, stop, grace_s=0).wait()
    assert failure is not None
    assert (failure.rank.number, failure.exit_code) == (first, code)
    assert failure.cause.startswith(cause)


class Silence(Heartbeats):
    """Every running rank has been silent for too long."""

    def is_lost(self, rank: Rank) -> bool:
        return True


def test_a_rank_that_has_just_failed_is_the_cause_and_not_the_silent_one_that_it_waited_for(tmp_path: Path) -> None:
    ranks = [
        Rank(number, subprocess.Popen(command, stdin=subprocess.PIPE), None, 0)
        for number, command in enumerate((["false"], ["cat"]))
    ]
    try:
        ranks[0].process.wait()
        with StopSignal() as stop:
            watch = RankWatch(ranks, stop, grace_s=0, heartbeats=Silence(tmp_path, 1.0))
            time.sleep(1)  # so that the first look at failed ranks is also a look at silent ones
            failure = watch.wait()
    finally:
        ranks[1].process.kill()
        ranks[1].process.wait()
    assert failure is not None
    assert (failure.rank.number, failure.cause) == (0, "failed with exit code 1")


def test_torchrun_leaves_with_the_code_of_a_lost_rank_where_nccl_aborts() -> None:
    assert [exit_code_of(code) for code in (-signal.SIGABRT, -signal.SIGKILL, 3, 5)] == [5, 137, 3, 5]


def watched(path: Path, num_ranks: int, limit_s: float, clock: Callable[[], float] = time.monotonic) -> int:
    heartbeats = Heartbeats(path.parent / "heartbeats", limit_s, clock)
    return run_ranks([sys.executable, str(path)], num_ranks, path.parent / "logs", heartbeats=heartbeats)


@pytest.mark.fault(
    "ranks",
    "SIGSTOP of a lone rank, or of all ranks",
    happens="the launcher misses their heartbeats for `train.process_group_timeout_s` and names step and phase",
    exit_code=5,
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.waits
def test_silent_ranks_are_ended(
    program: Callable[[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    num_ranks: int,
    notice: Notice,
) -> None:
    path = program(BEATING + "    os.kill(os.getpid(), signal.SIGSTOP)")

    def clock() -> float:
        """Starts to run when rank 0 has reported its place: on a busy machine a start takes longer than the limit."""
        beat = read_beat(tmp_path / "heartbeats", 0)
        return time.monotonic() if beat is not None and beat.step == 7 else 0.0

    with notice:
        code = watched(path, num_ranks, 2.0, clock)
    assert code == notice.exit_code
    errors = capfd.readouterr().err
    assert "error: rank 0 has shown no sign of life for 2 s, like every other rank" in errors
    assert "(last seen in save of step 7)" in errors


@pytest.mark.fault(
    "ranks",
    "SIGSTOP of a rank before its first heartbeat",
    happens="as later: the launcher counts from the start of the rank",
    exit_code=5,
)
@pytest.mark.waits
def test_ranks_that_never_gave_a_sign_are_ended(program: Callable[[str], Path], notice: Notice) -> None:
    with notice:
        code = watched(program("os.kill(os.getpid(), signal.SIGSTOP)"), 1, limit_s=1.0)
    assert code == notice.exit_code


WORKING = {
    "beating": (BEATING + "    time.sleep(3)", 1.5),
    "computing, but unable to write": (
        "while time.process_time() < 1.5: tell('computed', time.process_time())",
        0.75,
    ),
    "one of two beating": (BEATING + "    if rank == 0: time.sleep(3)", 1.5),
}
"""What ranks do for twice the time after which they would be lost, and that time."""


def clock_of_work(folder: Path) -> Callable[[], float]:
    """Returns a clock that advances with the work of rank 0, a second a heartbeat or of processor time: the same on a
    busy machine."""
    beats = set()

    def now() -> float:
        beats.add(read_beat(folder / "heartbeats", 0))
        computed = folder / "computed"
        return len(beats) + (float(computed.read_text() or 0) if computed.exists() else 0.0)

    return now


@pytest.mark.parametrize(("body", "limit_s"), WORKING.values(), ids=WORKING.keys())
@pytest.mark.waits
def test_ranks_that_do_something_are_left_alone(
    program: Callable[[str], Path], tmp_path: Path, body: str, limit_s: float
) -> None:
    clock = clock_of_work(tmp_path)
    assert watched(program(body), 2 if "rank == 0" in body else 1, limit_s=limit_s, clock=clock) == 0
    assert clock() > limit_s * 5 / 3, "long enough to be lost"


def test_what_an_earlier_start_left_is_no_sign_of_life(
    program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = program(BEATING)
    assert watched(path, 1, limit_s=30.0) == 0
    path.write_text(path.read_text().replace(BEATING, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert watched(path, 1, limit_s=30.0) == 5
    assert "was killed by SIGKILL; the other" in capfd.readouterr().err, "without the place of the start before"


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 60.0, 3600.0]), min_size=1, max_size=40))
def test_time_in_which_the_launcher_stood_still_does_not_count(gaps: list[float]) -> None:
    """`scontrol suspend` stops the launcher and its ranks like this."""
    now, process = [0.0], subprocess.Popen(["true"])
    process.wait()  # so that it gives no sign of life at all
    rank, heartbeats = Rank(0, process, None, 0), Heartbeats(Path("nothing.here"), 5.0, lambda: now[0])
    assert not heartbeats.is_lost(rank)
    awake_s = 0.0
    for gap in gaps:
        now[0] += gap
        awake_s += min(gap, 2.0)
        assert heartbeats.is_lost(rank) == (awake_s > 5.0)
