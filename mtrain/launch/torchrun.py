"""torchrun that no stop signal ends while it loads: `python -m mtrain.launch.torchrun` takes torchrun's own arguments.

torchrun handles signals only once it starts its ranks, seconds after its own start, and a rank handles them a moment
later still. So they are blocked before torch is imported, which the ranks inherit until their handlers stand
(`StopSignal`), and let through to torchrun when it has started all of its ranks. torchrun then passes them on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import psutil

from mtrain.base.signals import STOP_SIGNALS

_POLL_S = 0.05


def main() -> None:
    """Runs torchrun in this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_let_through, name="signals", daemon=True).start()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as run

    try:
        run()
    except SignalException as stop:
        sys.exit(f"torchrun was stopped by {stop.sigval.name}; REQUEUE in the run folder says whether they saved")


def _let_through() -> None:
    """A signal to the process reaches the thread that does not block it; Python's handler runs in the main thread."""
    while not _has_started_its_ranks():
        time.sleep(_POLL_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Event().wait()


def _has_started_its_ranks() -> bool:
    own = psutil.Process().environ()
    sizes = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            environment = child.environ()
            if environment != own and "LOCAL_WORLD_SIZE" in environment:  # equal: between fork and exec
                sizes.append(int(environment["LOCAL_WORLD_SIZE"]))
    return bool(sizes) and len(sizes) >= sizes[0]


if __name__ == "__main__":
    main()
