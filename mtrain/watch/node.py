"""Shared by the ranks of a node and their watchdog: a folder in memory for each launch, and the state of processes in
/proc, which takes microseconds to read and needs no library."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_MEMORY = Path("/dev/shm")
_OF_LOCAL_LAUNCH = ("MTRAIN_LAUNCH",)
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_SRUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID")


def node_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder that only the ranks of this launch on this node share; does not create it."""
    if environ.get("MTRAIN_LAUNCH"):
        names: tuple[str, ...] = _OF_LOCAL_LAUNCH
    elif "RANK" in environ:
        names = _OF_TORCHRUN
    else:
        names = _OF_SRUN
    values = [environ.get(name, "") for name in names]
    if not any(values):
        values = [str(os.getpid())]  # alone
    code = hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"mtrain-{os.getuid()}-{code}"


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank:05d}"


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LONGEST = 20_000


class ProcessState(NamedTuple):
    letter: str
    """R runs, S sleeps, D waits for a disk, T is stopped by a signal, t by a debugger."""
    cpu_s: float
    tracer: int
    """PID of its debugger; 0 for none."""
    caught_signals: int
    """Bit mask of the signals that have a handler."""

    @property
    def is_stopped(self) -> bool:
        return self.letter == "T"

    @property
    def is_debugged(self) -> bool:
        """Whether gdb, strace, py-spy or the like is attached."""
        return self.tracer != 0

    def catches(self, number: int) -> bool:
        return bool(self.caught_signals >> (number - 1) & 1)


def process_state(pid: int) -> ProcessState | None:
    """Reads the state of a process; None if it has ended or is not visible."""
    try:
        # the name, in parentheses, may contain anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    seconds = (int(fields[11]) + int(fields[12])) * _TICK_S
    return ProcessState(fields[0], seconds, int(values.get("TracerPid", 0)), int(values.get("SigCgt", "0"), 16))


def kernel_view(pid: int) -> str:
    """Describes where each thread waits in the kernel, as far as this user has permission to see."""
    lines = []
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return "the process is gone\n"
    for thread in threads:
        folder = Path(f"/proc/{pid}/task/{thread}")
        name, state = text_of(folder / "comm"), text_of(folder / "status").partition("State:\t")[2].partition("\n")[0]
        lines.append(f"thread {thread} {name.strip()}: {state}")
        for what in ("wchan", "syscall", "stack"):
            if (text := text_of(folder / what).strip()) and text != "0":
                lines += [f"  {what}: {line}" for line in text.splitlines()]
    return "\n".join(lines)[:_LONGEST] + "\n"


def memory_kills() -> int:
    """Counts the processes that the kernel has killed for lack of memory, in this cgroup or on this machine."""
    counts = []
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        lines = [line.split() for line in text_of(path).splitlines()]
        counts += [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]
    return max(counts, default=0)


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
