"""Runs torchrun so that no stop signal kills it while it loads; exits with the code of the rank that failed first.

`python -m mtrain.launch.torchrun` takes torchrun's own arguments. torchrun handles signals only once it starts its
ranks, seconds after its own start, and a rank handles them a moment later still. So this module blocks the signals
before it imports torch, and ranks inherit the block until they install their handlers (`StopSignal`). torchrun unblocks
them once it has started all of its ranks, and passes them on. If it has no ranks a while after a signal, it is waiting
for other nodes, which may never come; it has nothing to save, and exits.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from mtrain.base.errors import MachineError
from mtrain.base.signals import STOP_SIGNALS
from mtrain.launch.watch import exit_code_of
from mtrain.runs.failure import REPORT_TO, last_failure, last_summary

STOPPED = 75
"""Exit code after a stop signal: all work is saved, and the run may be restarted (EX_TEMPFAIL of sysexits.h)."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # communication is queued in the order in which it was issued
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGHUP",  # torchrun passes them on to its ranks,
    "PET_SHUTDOWN_TIMEOUT": "300",  # which get this many seconds to save
}
"""Environment variables for the ranks and torchrun; a variable that is already set keeps its value."""
_POLL_S = 0.05
_LONGEST_WAIT_S = 5.0
"""Seconds that ranks may take to begin, from the later of a stop signal and the end of torchrun's loading."""


def torchrun_arguments(nodes: int, ranks_per_node: int, node_rank: str, first_node: str, port: int) -> list[str]:
    """Returns torchrun's arguments for one node of several.

    Args:
        node_rank: Number of this node, or a variable that a shell or Kubernetes replaces by it.
        port: Port on the first node, which must be free there.
    """
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks_per_node}",
        f"--node-rank={node_rank}",
        f"--master-addr={first_node}",
        f"--master-port={port}",
    ]


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    folder = tempfile.mkdtemp(prefix="mtrain-torchrun-")
    waits = threading.Event()
    threading.Thread(target=_let_through, args=[folder, waits], name="signals", daemon=True).start()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as run
    from torch.distributed.run import parse_args, parse_min_max_nnodes

    reported = Path(os.environ.setdefault(REPORT_TO, str(Path(folder, "run_dir"))))
    try:
        nodes = parse_args(sys.argv[1:]).nnodes  # type: ignore[no-untyped-call]  # torch has no annotation here
        if parse_min_max_nnodes(nodes) != (1, 1):
            waits.set()
        run()
    except SignalException as stop:
        text = f"torchrun was stopped by {stop.sigval.name}; REQUEUE in the run folder says whether the ranks saved"
        print(text, file=sys.stderr)
        sys.exit(STOPPED)
    except ChildFailedError as failed:
        if (code := _exit_code(reported)) is not None:
            sys.exit(code)
        rank, failure = failed.get_first_failure()
        print(f"error: rank {rank} failed first on this node, with exit code {failure.exitcode}", file=sys.stderr)
        sys.exit(exit_code_of(failure.exitcode))
    except (DistError, RendezvousError) as fault:
        print(f"error: {_without_a_meeting_place(fault)}", file=sys.stderr)
        sys.exit(MachineError.exit_code)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_a_meeting_place(fault: Exception) -> str:
    """Explains in one sentence why torchrun's nodes could not find each other."""
    lines = str(fault).splitlines() or [type(fault).__name__]
    port = re.search(r"port: (\d+)", lines[0])
    if "EADDRINUSE" in lines[0] and port is not None:
        return (
            f"port {port[1]} of this machine, at which torchrun's nodes meet, is in use; set --master-port "
            "(MASTER_PORT for launch/torchrun.sh) to a free port on all nodes, or stop the program that uses it"
        )
    return (
        f"torchrun's nodes cannot meet: {lines[0]}; check --master-addr and --master-port (MASTER_ADDR and MASTER_PORT "
        "for launch/torchrun.sh), and that node 0 has started"
    )


def _exit_code(file: Path) -> int | None:
    """Prints the failure in the run folder; returns the exit code of its first cause, or None without a failure."""
    if not file.exists():
        return None
    run_dir = Path(file.read_text())
    first = last_failure(run_dir)
    print(last_summary(run_dir), end="", file=sys.stderr, flush=True)
    return None if first is None else first.exit_code


def _let_through(folder: str, waits: threading.Event) -> None:
    """Unblocks stop signals in this thread, so that they reach the process; Python's handler runs in the main thread.

    Exits the process if a signal came, no rank has begun, and torchrun may be waiting for other nodes. A launch on one
    node never exits here: its ranks always begin, even if a busy machine takes longer than any limit to load torch.
    """
    limit_s = None
    while not (ranks := _ranks()) or len(ranks) < int(ranks[0]["LOCAL_WORLD_SIZE"]):
        sent = signal.sigpending().intersection(STOP_SIGNALS)
        if not sent or ranks or not waits.is_set():
            limit_s = None
        elif limit_s is None:
            limit_s = time.monotonic() + _LONGEST_WAIT_S
        elif time.monotonic() > limit_s:
            shutil.rmtree(folder, ignore_errors=True)
            name = signal.Signals(min(sent)).name
            print(f"torchrun was stopped by {name} before its ranks began", file=sys.stderr, flush=True)
            os._exit(STOPPED)  # the main thread waits for other nodes, where no handler runs
        time.sleep(_POLL_S)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Event().wait()


def _ranks() -> list[dict[str, str]]:
    """Returns the environments of the running ranks."""
    own_environment = psutil.Process().environ()
    environments = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            environment = child.environ()
            if environment != own_environment and "LOCAL_WORLD_SIZE" in environment:  # equal: between fork and exec
                environments.append(environment)
    return environments


if __name__ == "__main__":
    main()
