"""Stacks of hanging ranks, from their own handler in C, which needs no GIL, and from outside."""

import contextlib
import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from mtrain.base.heartbeat import Beat
from mtrain.watch.node import kernel_view, process_state, stack_file, text_of

SIGNAL = signal.SIGUSR2
_PATIENCE_S = 1.5
_SETTLED_S = 0.15
_PY_SPY_S = 3.0
_TRACES = "nccl_trigger_"
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Environment variables that make NCCL record its last collectives: sequence number, sizes, state."""


def answer_to_signal(folder: Path, rank: int) -> None:
    """Makes this process write its stacks to its stack file whenever it receives SIGNAL, even inside a C call."""
    # stays open until the process ends: the handler may neither open a file nor allocate memory
    file = stack_file(folder, rank).open("wb")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    _files.append(file)


_files: list[object] = []


def flight_recorder(folder: Path) -> dict[str, str]:
    """Returns environment variables that make NCCL's flight recorder dump on request, into a folder on this node."""
    return {
        **FLIGHT_RECORDER,
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl_trace_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl_trace_"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / _TRACES),
    }


def ask(states: Sequence[Beat]) -> list[Beat]:
    """Asks ranks for their stacks, which costs each a millisecond; returns those that will answer.

    A stopped rank answers when it is continued, which continues all of its threads at once. Its main thread has to
    answer itself, since it would move on while another thread answers. In a running rank any thread may answer, since
    the main thread may be deep in the kernel.
    """
    asked_ranks = []
    for state in states:
        process = process_state(state.pid)
        if process is not None and process.catches(SIGNAL):
            with contextlib.suppress(OSError):
                (_send_to_main_thread if process.is_stopped else os.kill)(state.pid, SIGNAL)
                asked_ranks.append(state)
    return asked_ranks


def _send_to_main_thread(pid: int, number: int) -> None:
    """Sends a signal to the main thread only, or to the process if the C library has no tgkill."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "tgkill"):  # glibc before 2.30, musl
        os.kill(pid, number)
    elif library.tgkill(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def dump(folder: Path, states: Sequence[Beat], lost: int, out: Path) -> dict[int, Path]:
    """Writes each rank's stacks to a file in the folder `out`; returns rank -> file, without files that failed.

    py-spy also looks at the rank `lost`. Stopped ranks are continued so that they answer; kill them afterwards.
    """
    seen = {state.rank: process_state(state.pid) for state in states}
    in_kernel = {state.rank: kernel_view(state.pid) for state in states}
    from_outside = {state.rank: _py_spy(state.pid) for state in states if state.rank == lost}
    stopped = [state for state in states if (one := seen[state.rank]) is not None and one.is_stopped]
    for group in ([state for state in states if state not in stopped], stopped):
        answering = ask(group)
        for state in stopped if group is stopped else []:
            with contextlib.suppress(OSError):
                os.kill(state.pid, signal.SIGCONT)
        _settle([stack_file(folder, state.rank) for state in answering])
    _ask_flight_recorders(folder)
    files: dict[int, Path] = {}
    for state in states:
        python_stack = text_of(stack_file(folder, state.rank))
        parts = [f"rank {state.rank}, process {state.pid}, in {state.place}\n"]
        parts.append(
            f"\n== by faulthandler\n{python_stack}" if python_stack else "\n== faulthandler has not answered\n"
        )
        if text := from_outside.get(state.rank):
            parts.append(f"\n== by py-spy\n{text}")
        parts.append(f"\n== in the kernel\n{in_kernel[state.rank]}")
        with contextlib.suppress(OSError):
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"stacks_rank_{state.rank:05d}.txt"
            path.write_text("".join(parts), encoding="utf-8", errors="replace")
            files[state.rank] = path
    for trace in folder.glob("nccl_trace_*"):
        with contextlib.suppress(OSError):
            shutil.copyfile(trace, out / trace.name)
    return files


def innermost(text: str, num_frames: int = 3) -> list[str]:
    """Returns the main thread's innermost frames from the text of a `dump` file: `File "x.py", line 3 in f`."""
    # faulthandler lists the oldest thread last; the title of the last section differs
    blocks = re.split(r"^(?:Current t|T)hread 0x.*$", text.partition("\n== by py-spy")[0], flags=re.MULTILINE)
    return [line.strip() for line in blocks[-1].splitlines() if line.startswith("  File ")][:num_frames]


def _settle(files: Sequence[Path]) -> None:
    """Waits until every file has content and no longer grows, but at most `_PATIENCE_S` seconds."""
    deadline, sizes, since = time.monotonic() + _PATIENCE_S, [0] * len(files), time.monotonic()
    while time.monotonic() < deadline:
        now = [len(text_of(path)) for path in files]
        if now != sizes:
            sizes, since = now, time.monotonic()
        if all(now) and time.monotonic() - since > _SETTLED_S:
            return
        time.sleep(0.02)


def _py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    # without pausing the process, since ptrace cannot pause one that is stopped
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.SubprocessError) as fault:
        return f"{fault}\n"
    return done.stdout or done.stderr


def _ask_flight_recorders(folder: Path) -> None:
    """Asks NCCL's flight recorders to dump, by a write to the pipe that torch reads on each rank."""
    for pipe in folder.glob(f"{_TRACES}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1\n")
            finally:
                os.close(descriptor)
