"""Runs `python -m mtrain` or a tool in a process that has imported torch and megatron-core, without their start.

A fresh interpreter needs three seconds of a core before it trains, and so does every rank that a launcher starts. Here
a fork server that has imported everything forks the command instead; if the command is a launcher, its ranks are forked
from it in turn. All else is the program's own: arguments, environment, working folder, signals, exit code.
Tests of what happens during imports start a real interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.paths import ROOT

PRELOADED = (
    "mtrain.cli.main",
    "mtrain.cli.ranks",
    "mtrain.launch.local",
    "mtrain.training.trainer",
    "mtrain.convert.verifying",
    "tests.warm",
)
_SERVER: Any = vars(forkserver)["_forkserver"]
_PROGRAM = [sys.executable, "-m", "mtrain"]
_POLL_S = 0.01


def program_environment(*importable: Path) -> dict[str, str]:
    """Returns this environment, with the repository and further folders importable, and one thread per process."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(":"))  # such as another megatron-core
    return {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *importable, *given))), "OMP_NUM_THREADS": "1"}


def completed(
    arguments: Sequence[object],
    folder: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Runs a command from its start to its end, and returns what `subprocess.run` does.

    Args:
        arguments: Arguments of the command, as in `Command`.
        folder: Folder in which the command runs.
        environment: Whole environment; by default `program_environment()`.
        timeout: Time in seconds after which the command is ended.

    Raises:
        subprocess.TimeoutExpired: The command did not end in time.
    """
    command = Command(given := list(map(str, arguments)), folder, environment or program_environment())
    try:
        output, errors = command.communicate(timeout)
    except subprocess.TimeoutExpired:
        command.kill()
        raise
    return subprocess.CompletedProcess(given, command.wait(), output, errors)


class Command:
    """Running command; has the part of subprocess.Popen that tests use."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], device: Path | None = None
    ) -> None:
        """Starts the command.

        Args:
            arguments: Either `python -m mtrain ...`, or `python FILE ...` for a file of tools/.
            folder: Folder in which the command runs.
            environment: Whole environment of the command.
            device: File for standard output and standard error, where they are not kept.
        """
        if list(arguments[:3]) == _PROGRAM:
            script, rest = None, list(arguments[3:])
        else:
            script, rest = arguments[1], list(arguments[2:])
            assert arguments[0] == sys.executable, arguments
            assert script.endswith(".py"), arguments
        own = tempfile.mkdtemp(prefix="mtrain-command-")
        weakref.finalize(self, shutil.rmtree, own)  # the output can be read as long as this object exists
        self._outputs = [device or Path(own, name) for name in ("output", "errors")]
        for path in self._outputs:
            path.touch()
        context = multiprocessing.get_context("forkserver")
        job = (script, rest, str(folder), dict(environment), *map(str, self._outputs), server_address())
        self._process = context.Process(target=run_here, args=job)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the command runs, negative where a signal ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code; None while the command runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the command and returns its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mtrain", timeout or 0.0)
        return self._process.exitcode

    def output(self) -> str:
        """Returns standard output so far."""
        return self._outputs[0].read_text(errors="replace")

    def errors(self) -> str:
        """Returns standard error so far."""
        return self._outputs[1].read_text(errors="replace")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns standard output and standard error, once the command has ended."""
        self.wait(timeout)
        return self.output(), self.errors()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the command, as to the real command line."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the command at once."""
        self.send_signal(signal.SIGKILL)


class ForkedRank:
    """Rank that was forked from its launcher; has the part of subprocess.Popen that a launcher uses."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Any,
        stderr: Any,
        preexec_fn: Callable[[], None],
        stdin: int = subprocess.DEVNULL,
        process_group: int = 0,
    ) -> None:
        """Forks the rank."""
        assert list(command[:3]) == _PROGRAM, command
        assert process_group == 0
        self.args = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            preexec_fn()  # blocks stop signals, so none is lost while the handlers are those of a new process
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            for file, descriptor in ((stdout, 1), (stderr, 2)):
                if file is not None:
                    os.dup2(file.fileno(), descriptor)
            os._exit(_main(None, command[3:], env))

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the rank has ended, and returns its exit code."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("mtrain", timeout or 0.0)
            time.sleep(_POLL_S)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the rank if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_server_at_root() -> None:
    """Lets the fork server start in the repository's folder, wherever the test is that starts it.

    It imports what is in its own folder, and leaves out in silence what it does not find: `tests`, with the filters of
    warnings, in a test that has gone to another folder.
    """
    start = _SERVER.ensure_running

    def at_root() -> None:
        is_running = vars(_SERVER)["_forkserver_pid"] is not None
        with contextlib.nullcontext() if is_running else contextlib.chdir(ROOT):
            start()

    vars(_SERVER)["ensure_running"] = at_root


def server_address() -> str:
    """Returns the address of this process's fork server, which is started where it does not run yet."""
    _SERVER.ensure_running()
    address: str = vars(_SERVER)["_forkserver_address"]
    return address


def run_here(
    script: str | None,
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    output: str,
    errors: str,
    server: str,
) -> None:
    """Runs the command in this process, which was forked for it and ends with it.

    Args:
        script: Script of tools/; None for `python -m mtrain`.
        arguments: Arguments of the command or script.
        folder: Folder in which the command runs.
        environment: Whole environment of the command.
        output: Existing file, to which standard output is appended.
        errors: Existing file, to which standard error is appended.
        server: Address of the fork server, which also forks the ranks of `mtrain verify`: a second one would have to
            import everything again.
    """
    from mtrain.launch import local

    gc.freeze()  # as after the imports of a program that starts by itself
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(folder)
    vars(_SERVER).update(_forkserver_address=server, ensure_running=lambda: None)
    vars(local)["subprocess"] = SimpleNamespace(Popen=ForkedRank, run=_run_forked, DEVNULL=subprocess.DEVNULL)
    os._exit(_main(script, arguments, environment))


def _run_forked(command: Sequence[str], check: bool) -> subprocess.CompletedProcess[bytes]:
    """Runs another verb in a fork of its launcher, as `subprocess.run` in a new interpreter."""
    assert list(command[:3]) == _PROGRAM, command
    assert not check
    if (pid := os.fork()) == 0:
        os._exit(_main(None, command[3:], dict(os.environ)))
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _main(script: str | None, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the program itself, or a script; returns its exit code."""
    import torch

    from mtrain.__main__ import main

    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(":")
    sys.argv = [script or "mtrain", *arguments]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output, errors = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w", buffering=1)
    vars(sys).update(stdout=output, __stdout__=output, stderr=errors, __stderr__=errors)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        main() if script is None else runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    vars(threading)["_shutdown"]()  # joins threads, as an interpreter does at its end
    for stream in (output, errors):
        stream.flush()
    return code
