"""A program of the user's own as one rank: `python -m mtrain.launch.program PROGRAM ARGUMENTS...`."""

import runpy
import signal
import sys
from pathlib import Path

from mtrain.base.signals import STOP_SIGNALS


def run(program: str, arguments: list[str]) -> None:
    """Runs a file as Python does: it is `__main__`, and can import modules from its folder."""
    # the launcher blocks these until `mtrain train` has installed its handlers; a user's program has none
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
