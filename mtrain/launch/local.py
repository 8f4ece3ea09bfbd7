"""Starts several ranks on this machine; they start together, stop together, and none is left running."""

import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from mtrain.base.certificate import certificate_folder, certificates
from mtrain.base.errors import ConfigError, MachineError, RankLostError
from mtrain.base.files import disk_faults
from mtrain.base.heartbeat import Beat
from mtrain.base.signals import STOP_SIGNALS, StopSignal
from mtrain.launch.checked import checked_config
from mtrain.launch.watch import Failure, Heartbeats, Rank, RankWatch
from mtrain.runs.failure import FailureClass, FailureRecord, last_failure, last_summary, record_failure
from mtrain.watch.node import node_folder
from mtrain.watch.watchdog import ENDING, ORDERED

MARK = "MTRAIN_LAUNCH"
"""Environment variable that marks every process started by a launch's ranks."""

_PORTS = (15000, 32768)
_AFTER_WATCHDOG_S = 12.0
_POLL_S = 0.05
_LOG_LINES = 60
INTERRUPTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up at import, because a forked child must not wait for the loader's lock; None outside Linux."""


def launch_local(num_ranks: int, paths: Sequence[Path], overrides: Sequence[str], certifies: bool = False) -> int:
    """Trains with `num_ranks` ranks on this machine and returns the exit code.

    Args:
        certifies: Whether to run `mtrain verify backend` first if this machine has no certificate for these layers.
            Layers that fail are not used; if the check ends without a certificate, no rank starts.
    """
    config = checked_config(paths, overrides, num_ranks)
    program, arguments = [sys.executable, "-m", "mtrain"], [*map(str, paths), *overrides]
    if certifies:
        before = _certificate_names()
        checked = subprocess.run([*program, "verify", "backend", *arguments, "--unless-certified"], check=False)
        # a certificate also says which candidates are wrong or crashed, whatever the exit code
        if checked.returncode != 0 and _certificate_names() == before:
            return checked.returncode if checked.returncode > 0 else 128 - checked.returncode
    command = [*program, "train", *arguments]
    folder = Path(config.run.dir)
    # a watchdog reports first, as it knows more
    patience_s = _AFTER_WATCHDOG_S if config.watch.enabled else 0.0
    heartbeats = Heartbeats(folder / "heartbeats", config.train.process_group_timeout_s + patience_s)
    return run_ranks(command, num_ranks, folder / "logs", heartbeats=heartbeats)


def _certificate_names() -> list[str]:
    return [certificate.name for certificate in certificates(certificate_folder())]


def launch_program(num_ranks: int, program: Path, arguments: Sequence[str]) -> int:
    """Runs a user's program, for example one that uses `Engine`, on `num_ranks` ranks and returns the exit code."""
    if not program.is_file():
        raise ConfigError(f"{program} does not exist; name a Python program, or the YAML files of a run")
    with disk_faults("create a log folder"):
        logs = Path(tempfile.mkdtemp(prefix=f"{program.stem}-"))
    if num_ranks > 1:
        print(f"ranks from 1 on write to {logs}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "mtrain.launch.program", str(program), *arguments]
    return run_ranks(command, num_ranks, logs)


def run_ranks(
    command: Sequence[str], num_ranks: int, log_dir: Path, grace_s: float = 10.0, heartbeats: Heartbeats | None = None
) -> int:
    """Runs `command` once per rank with torchrun's environment variables, and returns the exit code.

    Rank 0 shares our output; the others append to `log_dir`/rank_<r>.log. Every rank receives each stop signal, even
    one that arrived before the ranks existed; a second SIGINT kills them. Ranks start with these signals blocked and
    must unblock them, so that no signal is lost before they can handle it. When a rank fails, the others have `grace_s`
    seconds to end before they are killed, and the failing rank's error is shown once. A rank that is still suspended by
    SIGSTOP `grace_s` seconds after a stop signal is killed, and so are all ranks once none shows a sign of life.

    Args:
        heartbeats: Signs of life of the ranks; None does not watch them.

    Returns:
        0; the exit code of the rank that failed first; 5 if a signal killed it or it was stopped; 130 after a second
        SIGINT.
    """
    mark = secrets.token_hex(8)
    try:
        with StopSignal() as stop, _started(command, num_ranks, log_dir, mark) as ranks:
            failure = RankWatch(ranks, stop, grace_s, heartbeats).wait()
            # gives a watchdog that is ending the job some seconds to report before it is killed with the ranks
            deadline = time.monotonic() + (0.0 if failure is None else _AFTER_WATCHDOG_S)
            while (node_folder({MARK: mark}) / ENDING).exists() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return INTERRUPTED
    if failure is None:
        return 0
    first = None if heartbeats is None else _first_cause(failure, heartbeats, log_dir.parent, mark)
    if first is None:
        _show(failure, ranks[0], heartbeats)
        return failure.exit_code
    print(last_summary(log_dir.parent), end="", file=sys.stderr)
    if first.kind is FailureClass.BUG and ranks[first.rank].log is not None:
        _show_log(ranks[first.rank])  # its traceback
    sys.stderr.flush()
    return first.exit_code


@contextmanager
def _started(command: Sequence[str], num_ranks: int, log_dir: Path, mark: str) -> Iterator[list[Rank]]:
    """Starts the ranks, and kills all of their processes at the end of the block."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
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
        shutil.rmtree(node_folder({MARK: mark}), ignore_errors=True)  # _kill has ended the watchdog that owns it


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
            preexec_fn=partial(prepare_child, os.getpid()),
        )
        return Rank(number, process, log, output.tell() if output is not None else 0)


def prepare_child(parent: int) -> None:
    """Makes the kernel kill this child when the launcher ends, however that happens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # kept across exec; StopSignal lets them through
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(RankLostError.exit_code)


def _kill(ranks: Sequence[Rank], mark: str) -> None:
    """Kills the ranks, their process groups, and every process that carries our mark."""
    with suppress(OSError):  # first, or the watchdog reports the ranks killed below as lost
        (folder := node_folder({MARK: mark})).mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / ORDERED).touch()
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


def _show(failure: Failure, first: Rank, heartbeats: Heartbeats | None) -> None:
    """Prints which rank failed first, why, and the end of its log, unless rank 0 has printed that itself."""
    failed, code = failure.rank, failure.rank.process.returncode
    if failure.is_of_its_own and (failed.log is None or (code > 1 and first.process.returncode == code)):
        return
    beat = None if heartbeats is None else heartbeats.of(failed)
    text = f"error: rank {failed.number} {failure.cause}{_seen(beat)}; the other ranks were stopped"
    print(text, file=sys.stderr, flush=True)
    _show_log(failed)


def _seen(beat: Beat | None) -> str:
    return "" if beat is None else f" (last seen in {beat.place})"


def _show_log(rank: Rank) -> None:
    """Prints the end of the rank's output, unless the rank shares ours."""
    if rank.log is None:
        return
    with rank.log.open("rb") as log:
        log.seek(rank.log_start_bytes)
        tail = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    if tail:
        print("\n".join([f"the end of {rank.log}:", *tail]), file=sys.stderr, flush=True)


def _first_cause(failure: Failure, heartbeats: Heartbeats, run_dir: Path, mark: str) -> FailureRecord | None:
    """Adds the launcher's record of this failure; returns the first cause in the run folder, or None."""
    reported = last_failure(run_dir)
    beat = heartbeats.of(failure.rank)
    if not failure.is_of_its_own and beat is not None and beat.start:
        seen = FailureRecord(
            rank=failure.rank.number,
            kind=FailureClass.LOST_PEER,
            error=failure.cause.split()[-1],
            message=f"rank {failure.rank.number} {failure.cause}{_seen(beat)}",
            exit_code=failure.exit_code,
            reported_by="launcher",
            time_s=failure.seen_s,
            place=beat.place,
            start=beat.start,
            launch=mark,
            host=socket.gethostname(),
        )
        with suppress(OSError):  # a full disk loses the record, not the message
            reported = record_failure(run_dir, seen)
    return reported if reported is not None and reported.launch == mark else None


def free_port() -> int:
    """Finds a free port below the range that the system assigns, so that it stays free."""
    for port in random.sample(range(*_PORTS), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise MachineError(
        f"no free port among 100 between {_PORTS[0]} and {_PORTS[1]}; stop programs that listen on this machine"
    )
