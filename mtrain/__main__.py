"""Entry point of `mtrain` and `python -m mtrain`; imports nothing heavy before stop signals are safe."""

import contextlib
import os
import signal
import sys
from typing import NoReturn

from mtrain.base.background import is_anything_running
from mtrain.base.output import survive_full_disks
from mtrain.base.signals import end_at_interrupt, hold_stop_signals, ignore_stop_signals, was_interrupted

_VERBS_THAT_SAVE = ("train", "launch")
"""Neither a stop signal, while they start, nor a full disk below their log must end these, as it ends any program."""


_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Runs the command line."""
    saves = bool(sys.argv[1:2]) and sys.argv[1] in _VERBS_THAT_SAVE
    if saves:
        hold_stop_signals()
        survive_full_disks()
    else:  # a trainer may hold programs of the user, and their plugins
        end_at_interrupt()
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else it reads what each package announces
    try:
        from mtrain.cli.main import app  # and the trainer, which takes ten seconds: signals must be held by now

        app(prog_name="mtrain")
    except BaseException as ending:
        if was_interrupted() or isinstance(ending, KeyboardInterrupt):  # whatever a library has made of it
            _say_interrupted()
            _leave(_INTERRUPTED)
        if isinstance(ending, SystemExit) and saves and is_anything_running():
            _leave(ending.code if isinstance(ending.code, int) else 0)
        raise
    finally:
        if saves:
            ignore_stop_signals()


def _say_interrupted() -> None:
    verb = " ".join(["mtrain", *sys.argv[1:2]])
    with contextlib.suppress(OSError, ValueError):  # nobody may read it any more
        print(f"interrupted: {verb} has not finished", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """At once. Python's own way out would wait for threads; and where Ctrl-C has met a string that `exec` or `eval`
    ran, such as a data class being made, it would end as if SIGINT had killed it, whatever the exit code is to be."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
