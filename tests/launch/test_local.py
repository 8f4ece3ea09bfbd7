"""Ranks of `mtrain launch local`: their environment, their end, and that none is left running."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from mtrain.base.certificate import Certificate, Comparison
from mtrain.base.signals import STOP_SIGNALS
from mtrain.cli.main import app
from mtrain.core.layers.certified import layers_of, machine_of
from mtrain.hf.configuration import load_config
from mtrain.launch.local import run_ranks
from tests.config.samples import config
from tests.fault_table import Notice
from tests.warm import completed

LAUNCHER = """
import sys
from pathlib import Path
from mtrain.launch.local import run_ranks
sys.exit(run_ranks([sys.executable, sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3]), grace_s=float(sys.argv[4])))
"""
UNBLOCK = "signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())"
HEAD = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
here = Path(__file__).parent
{UNBLOCK}
def tell(name, text=""):
    (here / "writing").mkdir(exist_ok=True)
    (here / "writing" / name).write_text(str(text))
    os.replace(here / "writing" / name, here / name)
"""
pytestmark = pytest.mark.usefixtures("hangup")
LONG_S = 300
"""Seconds that are longer than a test may take; nothing waits for them to pass."""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that writes the program of every rank."""

    def write(body: str) -> Path:
        path = tmp_path / "rank.py"
        path.write_text(HEAD + body)
        return path

    return write


def run(path: Path, num_ranks: int, grace_s: float = 10.0) -> int:
    return run_ranks([sys.executable, str(path)], num_ranks, path.parent / "logs", grace_s)


@contextmanager
def launcher(path: Path, num_ranks: int, grace_s: float = 10.0) -> Iterator[subprocess.Popen[str]]:
    """Starts a launcher in a process of its own, which a test may send signals."""
    command = [sys.executable, "-c", LAUNCHER, str(path), str(num_ranks), str(path.parent / "logs"), str(grace_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def wait_for_both(name: str, folder: Path, process: subprocess.Popen[str]) -> None:
    """Waits until both ranks have written their file `name`<rank>."""

    def is_there() -> bool:
        assert process.poll() is None, process.communicate()
        return all((folder / f"{name}{rank}").exists() for rank in range(2))

    wait_for(is_there)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_know_who_they_are(program: Callable[[str], Path], tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert run(program(f"tell(f'rank{{rank}}', ' '.join(os.environ[name] for name in {names}))"), 3) == 0
    reported = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(3)]
    ports = {words.pop() for words in reported}
    assert reported == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len(ports) == 1


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("3", "3")])
def test_threads_default_to_one(
    program: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    expected: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert run(program("tell('threads', os.environ['OMP_NUM_THREADS'])"), 1) == 0
    assert (tmp_path / "threads").read_text() == expected


def test_only_rank_0_is_shown(
    program: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "print('out', rank); print('err', rank, file=sys.stderr)"
    assert run(program(body), 2) == 0
    assert run(program(body), 2) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("out 0\n" * 2, "err 0\n" * 2)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {"rank_1.log"}
    assert sorted(logs["rank_1.log"].splitlines()) == ["err 1"] * 2 + ["out 1"] * 2


def test_the_first_failing_rank_gives_its_exit_code_and_its_error_once(
    program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = program("print(f'of rank {rank}', file=sys.stderr)\nif rank == 2: sys.exit(3)\ntime.sleep(900)")
    (path.parent / "logs").mkdir()
    (path.parent / "logs" / "rank_2.log").write_text("an earlier launch\n")
    started = time.monotonic()
    assert run(path, 3, grace_s=0.2) == 3
    assert time.monotonic() - started < LONG_S / 2
    shown = capfd.readouterr().err
    assert "error: rank 2 failed with exit code 3" in shown
    assert shown.count("of rank 2") == 1
    assert "of rank 1" not in shown
    assert "an earlier launch" not in shown


def test_ranks_that_fail_after_the_first_do_not_hide_it(
    program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
if rank == 1:
    print('the cause', file=sys.stderr); tell('failing', os.getpid()); sys.exit(1)
while not (here / 'failing').exists(): time.sleep(0.01)
first = Path('/proc', (here / 'failing').read_text())
while first.exists(): time.sleep(0.01)  # until the launcher has seen its end
time.sleep(0.5); print('a consequence', file=sys.stderr); sys.exit(7)
"""
    assert run(program(body), 3) == 1
    shown = capfd.readouterr().err
    assert "rank 1 failed with exit code 1" in shown
    assert "the cause" in shown
    assert shown.count("a consequence") == 1  # from rank 0, which shares our output


def test_what_rank_0_has_said_is_not_repeated(
    program: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(program("print('bad data', file=sys.stderr); sys.exit(3)"), 2) == 3
    assert capfd.readouterr().err == "bad data\n"


@pytest.mark.parametrize(
    ("name", "program_of_rank"),
    [
        ("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)"),
        ("SIGSEGV", "import ctypes; ctypes.string_at(0)"),
        ("SIGBUS", "os.kill(os.getpid(), signal.SIGBUS)"),
    ],
)
@pytest.mark.fault(
    "ranks",
    "kill -9 of a rank, a segmentation fault, an I/O error of a memory map",
    happens="the launcher names the rank and the signal",
    exit_code=5,
)
def test_a_killed_rank_is_named_with_its_signal(
    program: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    name: str,
    program_of_rank: str,
    notice: Notice,
) -> None:
    path = program(f"if rank == 1:\n    {program_of_rank}\ntime.sleep(900)")
    with notice:
        code = run(path, 2, grace_s=0.1)
    assert code == notice.exit_code
    assert f"error: rank 1 was killed by {name}" in capfd.readouterr().err


def test_ranks_may_end_by_themselves_within_the_grace(program: Callable[[str], Path], tmp_path: Path) -> None:
    path = program("if rank == 1: sys.exit(4)\ntime.sleep(0.3); tell('saved')")
    assert run(path, 2) == 4
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "number",
    [
        # one loop passes on all of them; Ctrl-C comes from a terminal
        each if each in (signal.SIGTERM, signal.SIGINT) else pytest.param(each, marks=pytest.mark.nightly)
        for each in STOP_SIGNALS
    ],
    ids=lambda number: number.name,
)
def test_signals_reach_every_rank_once(program: Callable[[str], Path], tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
received = []
signal.signal({int(number)}, lambda number, frame: received.append(number))
tell(f'ready{{rank}}')
while not received: time.sleep(0.01)
time.sleep(0.2); tell(f'received{{rank}}', len(received))
"""
    with launcher(program(body), 2) as process:
        wait_for_both("ready", tmp_path, process)
        process.send_signal(number)
        assert process.wait(20) == 0
    assert [(tmp_path / f"received{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_signal_before_a_rank_can_handle_it_is_kept(program: Callable[[str], Path], tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGUSR1, lambda number, frame: tell(f'received{rank}'))
tell(f'begun{rank}')
while signal.SIGUSR1 not in signal.sigpending(): time.sleep(0.01)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
tell(f'end{rank}')
"""
    path = program(body)
    path.write_text(path.read_text().replace(UNBLOCK, "", 1))
    with launcher(path, 2) as process:
        wait_for_both("begun", tmp_path, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 0
    assert all((tmp_path / f"received{rank}").exists() for rank in range(2))


def test_a_second_interrupt_kills(program: Callable[[str], Path], tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGINT, lambda number, frame: tell(f'received{rank}'))
tell(f'pid{rank}', os.getpid())
while True: time.sleep(0.05)
"""
    with launcher(program(body), 2) as process:
        wait_for_both("pid", tmp_path, process)
        process.send_signal(signal.SIGINT)
        wait_for_both("received", tmp_path, process)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert not any(is_running(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


class InterruptedLock:
    """Lock of a process that is looked at; whoever takes it is interrupted before it can prepare to give it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.interrupts = 0

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._lock.acquire(blocking)
        if self.interrupts < 2:
            self.interrupts += 1
            os.kill(os.getpid(), signal.SIGINT)
        return taken

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=5), "held by whoever was interrupted"

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_second_interrupt_while_a_rank_is_looked_at_leaves_no_lock_held(
    program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, poll = InterruptedLock(), subprocess.Popen.poll

    def interrupted(process: subprocess.Popen[bytes]) -> int | None:
        vars(process)["_waitpid_lock"] = lock
        return poll(process)

    monkeypatch.setattr(subprocess.Popen, "poll", interrupted)
    path = program("signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(900)")
    assert run(path, 1) == 130
    assert lock.interrupts == 2


CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session={session})"


@pytest.mark.parametrize("session", [False, True], ids=["child", "daemon"])
@pytest.mark.parametrize("code", [0, 1], ids=["done", "failed"])
def test_what_a_rank_started_does_not_outlive_the_launch(
    program: Callable[[str], Path], tmp_path: Path, session: bool, code: int
) -> None:
    path = program(f"child = {CHILD.format(session=session)}\ntell(f'pid{{rank}}', child.pid)\nsys.exit({code})")
    assert run(path, 2) == code
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_other_children_of_the_caller_are_left_alone(program: Callable[[str], Path]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"], env=dict(os.environ))
    try:
        assert run(program("sys.exit(1)"), 1) == 1
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ranks_die_with_a_killed_launcher(program: Callable[[str], Path], tmp_path: Path) -> None:
    with launcher(program("tell(f'pid{rank}', os.getpid()); time.sleep(900)"), 2) as process:
        wait_for_both("pid", tmp_path, process)
        process.kill()
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
        wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_program_of_ones_own_runs_on_all_ranks(tmp_path: Path) -> None:
    """The program gets its arguments, imports modules in its folder, and is stopped like a single process; its exit
    code is the command's."""
    (tmp_path / "beside.py").write_text("CODE = 4")
    (tmp_path / "own.py").write_text(
        "import os, signal, sys\n"
        "from beside import CODE\n"
        "from pathlib import Path\n"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "facts = [__name__, os.environ['WORLD_SIZE'], *sys.argv[1:], str(signal.SIGTERM in blocked)]\n"
        "Path(__file__).with_name(f'rank_{os.environ[\"RANK\"]}').write_text(' '.join(facts))\n"
        "sys.exit(CODE)\n"
    )
    command = ["launch", "local", "-n", "2", str(tmp_path / "own.py"), "layout.tp=2", "more"]
    assert CliRunner().invoke(app, command).exit_code == 4
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in range(2)] == 2 * ["__main__ 2 layout.tp=2 more False"]
    missing = CliRunner().invoke(app, ["launch", "local", "-n", "2", str(tmp_path / "none.py")])
    assert missing.exit_code == 2


def written(folder: Path) -> str:
    """Writes the configuration of a run of one step."""
    few = {
        "model__num_layers": 1,
        "train__num_steps": 1,
        "train__global_batch_size": 2,
        "run__dir": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(config(**few).model_dump_json(exclude_unset=True))
    return str(folder / "run.yaml")


def test_no_rank_starts_where_layers_cannot_be_certified(tmp_path: Path) -> None:
    run = [written(tmp_path), f"run.dir={tmp_path / 'run'}", "train.device=cuda"]
    done = completed([sys.executable, "-m", "mtrain", "launch", "local", "-n", "1", *run, "--certify"])
    assert done.returncode == 7
    assert "train.device=cuda needs a GPU" in done.stderr
    assert not (tmp_path / "run" / "logs").exists()
    program = tmp_path / "own.py"
    refused = CliRunner().invoke(app, ["launch", "local", "-n", "1", str(program), "--certify"])
    assert refused.exit_code == 2
    assert "--certify compares the layers of a configuration" in refused.output


@pytest.mark.parametrize(("certified", "code"), [(True, 5), (False, 8)])
def test_ranks_start_where_a_candidate_crashed_but_a_certificate_says_so(
    certified: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path / "certificates"))
    crashed = Certificate("now", {"gpu": "A"}, {}, {"te": Comparison(False, 0.0, 0.0, error="no kernel image")})
    name = crashed.save(tmp_path / "made").name
    move = f"mkdir {tmp_path}/certificates; mv {tmp_path}/made/{name} {tmp_path}/certificates" if certified else ":"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$3" = verify ] || exit 5\n{move}\nexit 8\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    ended = CliRunner().invoke(app, ["launch", "local", "-n", "1", written(tmp_path), "--certify"])
    assert ended.exit_code == code, ended.output


@pytest.mark.nightly
def test_a_run_with_a_certificate_starts_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_CERTIFICATES", str(tmp_path))
    path, machine = written(tmp_path), machine_of(torch.device("cpu"))
    found = {"te": Comparison(True, 1.0, 2.0)}
    name = Certificate("now", machine, layers_of(load_config([Path(path)])), found).save(tmp_path).name
    assert CliRunner().invoke(app, ["launch", "local", "-n", "1", path, "--certify"]).exit_code == 0
    assert f"{name} covers these layers on this machine" in capfd.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").exists()
