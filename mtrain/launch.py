"""Several ranks on this machine: started together, stopped together, none left behind."""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import psutil

from mtrain.config.load import load_config
from mtrain.errors import MachineError, RankLostError
from mtrain.files import disk_faults
from mtrain.layout import Layout

MARK = "MTRAIN_LAUNCH"
"""Environment variable by which a launch finds every process that comes from its ranks."""

_PORTS = (15000, 32768)
_POLL_S = 0.02
_LOG_LINES = 60
"""Lines of a failing rank's log that are shown."""
_INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up here, since a forked child must not wait for the loader's lock."""


@dataclass(frozen=True)
class Rank:
    """A running rank."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path | None
    """Where its output goes; None: it shares ours."""
    log_start_bytes: int
    """Size of the log before this launch."""


def launch_local(num_ranks: int, paths: Sequence[Path], overrides: Sequence[str]) -> int:
    """Trains with `num_ranks` ranks on this machine and returns the exit code.

    Raises:
        ConfigError: before a rank starts.
        MachineError: the log folder cannot be written.
    """
    config = load_config(paths, overrides)
    Layout.from_config(config, num_ranks)
    command = [sys.executable, "-m", "mtrain", "train", *map(str, paths), *overrides]
    return run_ranks(command, num_ranks, Path(config.run.dir) / "logs")


def run_ranks(command: Sequence[str], num_ranks: int, log_dir: Path, grace_s: float = 10.0) -> int:
    """Runs `command` once for each rank, under torchrun's environment variables, and returns the exit code.

    Rank 0 shares our output; what the others print is appended to `log_dir`/rank_<r>.log. SIGTERM, SIGUSR1 and SIGINT
    are passed on to every rank; a second SIGINT kills them. Once a rank has failed, the others have `grace_s` seconds
    to end, then they are killed; the failing rank's error is shown once.

    Returns:
        0; the exit code of the rank that failed first; 5 where a signal killed it; 130 after a second SIGINT.

    Raises:
        MachineError: the log folder cannot be written.
    """
    with _pending_signals() as pending, _started(command, num_ranks, log_dir) as ranks:
        failed = _watch(ranks, pending, grace_s)
        if pending.count(signal.SIGINT) > 1:
            return _INTERRUPTED
        if failed is None:
            return 0
    _show(failed, ranks[0])
    code = failed.process.returncode
    return code if code > 0 else RankLostError.exit_code


@contextmanager
def _pending_signals() -> Iterator[list[int]]:
    """Collects the signals to pass on, instead of dying of them."""
    pending: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _started(command: Sequence[str], num_ranks: int, log_dir: Path) -> Iterator[list[Rank]]:
    """Starts the ranks; afterwards nothing that came from them is running."""
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        MARK: mark,
    }
    with disk_faults(f"create the log folder {log_dir}"):
        log_dir.mkdir(parents=True, exist_ok=True)
    ranks: list[Rank] = []
    try:
        ranks.extend(_start(command, environment, number, log_dir) for number in range(num_ranks))
        yield ranks
    finally:
        _kill(ranks, mark)


def _start(command: Sequence[str], environment: dict[str, str], number: int, log_dir: Path) -> Rank:
    log = log_dir / f"rank_{number}.log" if number else None
    with ExitStack() as stack:
        output = None
        if log is not None:
            with disk_faults(f"write the log {log}"):
                output = stack.enter_context(log.open("ab"))
        process = subprocess.Popen(
            command,
            env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C reaches the ranks once, through us
            preexec_fn=partial(_die_with, os.getpid()),
        )
        return Rank(number, process, log, output.tell() if output is not None else 0)


def _die_with(parent: int) -> None:
    """Runs in the child before the command: the kernel kills it when the launcher ends, however that ends."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(RankLostError.exit_code)


def _watch(ranks: Sequence[Rank], pending: Sequence[int], grace_s: float) -> Rank | None:
    """Waits until every rank has ended, or the grace after a failure is over; returns the rank that failed first."""
    failed: Rank | None = None
    deadline = float("inf")
    num_passed_on = 0
    while _num_running(ranks) and time.monotonic() < deadline:
        for number in list(pending[num_passed_on:]):
            num_passed_on += 1
            if pending[:num_passed_on].count(signal.SIGINT) > 1:
                return failed
            for rank in ranks:
                rank.process.send_signal(number)
        if failed is None and (failed := _first_failed(ranks)) is not None:
            deadline = time.monotonic() + grace_s
        time.sleep(_POLL_S)
    return failed if failed is not None else _first_failed(ranks)


def _num_running(ranks: Sequence[Rank]) -> int:
    """Looks at every rank, so that the return codes of all that have ended are known."""
    return sum([rank.process.poll() is None for rank in ranks])


def _first_failed(ranks: Sequence[Rank]) -> Rank | None:
    """Of the ranks seen to have failed at once: who was killed, then who left with a code of its own, not 1 or 5.

    A rank whose peer is gone fails too, with 1 or 5; such followers must not hide the cause.
    """
    failed = [rank for rank in ranks if rank.process.returncode not in (None, 0)]
    return min(failed, key=_precedence, default=None)


def _precedence(rank: Rank) -> tuple[bool, bool, int]:
    code = rank.process.returncode
    return code > 0, code in (1, RankLostError.exit_code), rank.number


def _kill(ranks: Sequence[Rank], mark: str) -> None:
    """Ends the ranks, their process groups, and every process that carries our mark in its environment."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


def _show(failed: Rank, first: Rank) -> None:
    """Says which rank failed first and why, unless rank 0 has said so itself."""
    code = failed.process.returncode
    if code > 0 and (failed.log is None or (code > 1 and first.process.returncode == code)):
        return
    cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    lines = [f"error: rank {failed.number} {cause}; the other ranks were stopped"]
    if failed.log is not None:
        with failed.log.open("rb") as log:
            log.seek(failed.log_start_bytes)
            tail = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        lines += [f"the end of {failed.log}:", *tail] if tail else []
    print("\n".join(lines), file=sys.stderr, flush=True)


def _free_port() -> int:
    """A port that nothing listens on now, below those that systems hand out, so that none is given away meanwhile."""
    for port in random.sample(range(*_PORTS), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise MachineError(f"no free port among 100 between {_PORTS[0]} and {_PORTS[1]}; end what listens on this machine")
