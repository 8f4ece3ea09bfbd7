"""Points in the code at which tests make a process fail for real.

The environment variable MTRAIN_TEST_FAULT names a fault, rank, step and phase, such as `kill rank=1 step=4
phase=write.2`. For tests only.
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
"""Seconds after which a heartbeat with the new phase has certainly been written."""


class InjectedFault(NamedTuple):
    kind: str
    """Kind of the fault.

    gil: never releases the interpreter's lock. loop: loops forever. kill: SIGKILL. stop: SIGSTOP, after a heartbeat.
    usr1: SIGUSR1. hang: sleeps forever. slow: takes an additional second every time. await_stop: creates the file that
    the environment variable REACHED names and waits for a stop signal. full: the disk is full. nan, huge, flip: one
    element of the training state becomes nan or 3e38, or its lowest bit flips.
    """
    rank: int
    step: int
    phase: str
    """Phase of the step or save; for nan, huge and flip `KEY:INDEX`, a tensor's checkpoint key and an index in this
    rank's part."""

    def __str__(self) -> str:
        return f"{self.kind} rank={self.rank} step={self.step} phase={self.phase}"

    @classmethod
    def parsed(cls, text: str) -> "InjectedFault":
        """Parses the text that `str` writes."""
        kind, *items = text.split()
        values = dict(item.split("=", 1) for item in items)
        return cls(kind, int(values["rank"]), int(values["step"]), values["phase"])


def wanted_fault(rank: int, step: int) -> InjectedFault | None:
    """Returns the fault for this rank and step, in any phase; None without one."""
    text = os.environ.get(VARIABLE)
    fault = None if text is None else InjectedFault.parsed(text)
    return fault if fault is not None and (fault.rank, fault.step) == (rank, step) else None


def fault_point(phase: str, rank: int, step: int) -> None:
    """Fails if a test requests a fault in this phase, rank and step.

    Raises:
        OSError: ENOSPC, if the fault is a full disk.
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
