"""Places where tests make a process fail for real.

The environment variable MTRAIN_TEST_FAULT names one fault, rank, step and phase, such as
`kill rank=1 step=4 phase=write.2`. It is for tests only; without it nothing happens.
"""

import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from mtrain.base.signals import StopSignal

VARIABLE = "MTRAIN_TEST_FAULT"
REACHED = "MTRAIN_TEST_REACHED"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "usr1": signal.SIGUSR1}
_POLL_S = 0.05
_HEARTBEAT_S = 1.0
"""Time in which a heartbeat with the new phase is surely written."""


class InjectedFault(NamedTuple):
    """A fault that a test asks for, and where it happens."""

    kind: str
    """Kind of the fault.

    gil: the thread never releases the interpreter's lock. loop: it loops for ever. kill: SIGKILL to this process.
    stop: SIGSTOP, after its heartbeat was written. usr1: SIGUSR1. hang: the thread sleeps for ever. slow: it takes a
    second longer, every time. await_stop: the thread creates the file that the environment variable REACHED names, and
    waits until this process receives a stop signal. full: the disk has no space left. nan, huge, flip: one element of
    the training state becomes nan or 3e38, or its lowest bit flips."""
    rank: int
    step: int
    phase: str
    """Phase of a save; for nan, huge and flip: key of a tensor in checkpoints and index in this rank's part, as
    `key:-1`."""

    def __str__(self) -> str:
        return f"{self.kind} rank={self.rank} step={self.step} phase={self.phase}"

    @classmethod
    def parsed(cls, text: str) -> "InjectedFault":
        """Reads the text that `str` writes."""
        kind, *rest = text.split()
        values = dict(item.split("=", 1) for item in rest)
        return cls(kind, int(values["rank"]), int(values["step"]), values["phase"])


def wanted_fault(rank: int, step: int) -> InjectedFault | None:
    """Returns the fault that a test asks for at this rank and step, in any phase; None without one."""
    text = os.environ.get(VARIABLE)
    fault = None if text is None else InjectedFault.parsed(text)
    return fault if fault is not None and (fault.rank, fault.step) == (rank, step) else None


def fault_point(phase: str, rank: int, step: int) -> None:
    """Fails here if a test asks for it; otherwise returns at once.

    Raises:
        OSError: ENOSPC, where the fault is a full disk.
    """
    fault = wanted_fault(rank, step)
    if fault is None or fault.phase != phase:
        return
    if fault.kind == "stop":
        time.sleep(_HEARTBEAT_S)
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
        return
    while fault.kind == "hang":
        time.sleep(3600)
    if fault.kind == "gil":
        re.match("(a+)+$", "a" * 100 + "b")  # re keeps the lock, and tries 2^100 ways
    while fault.kind == "loop":
        pass
    if fault.kind == "await_stop":
        Path(os.environ[REACHED]).touch()
        with StopSignal() as stop:
            while stop.received is None:
                time.sleep(_POLL_S)
        return
    if fault.kind == "slow":
        time.sleep(1)
        return
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
