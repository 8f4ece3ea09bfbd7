"""State of a process as the kernel reports it in /proc; reading it costs microseconds and needs no library."""

import os
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LONGEST = 20_000


class ProcessState(NamedTuple):
    """State of a process at one time."""

    letter: str
    """R runs, S sleeps, D waits for a disk, T is stopped, t is held by a debugger."""
    cpu_s: float
    """Processor time that the process has used."""
    tracer: int
    """Process that debugs it; 0 if there is none."""
    caught_signals: int
    """Bit mask of the signals with a handler."""

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
    """Reads the state of a process; None if it has ended or cannot be seen."""
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
    """Describes where each thread waits in the kernel, as far as this user may read it."""
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
    """Counts the processes that the kernel has killed for lack of memory, in this cgroup and on this machine."""
    counts = []
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        lines = [line.split() for line in text_of(path).splitlines()]
        counts += [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]
    return max(counts, default=0)


def text_of(path: Path) -> str:
    """Reads a file; empty if that fails."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
