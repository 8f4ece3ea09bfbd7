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
"""Verbs that neither a stop signal during their start nor a full disk of their log may end, as it ends other
programs."""


_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Runs the command line."""
    saves = bool(sys.argv[1:2]) and sys.argv[1] in _VERBS_THAT_SAVE
    if saves:
        hold_stop_signals()
        survive_full_disks()
    else:  # a training program may contain code of the user, with its plugins
        end_at_interrupt()
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else pydantic reads the metadata of each package
    try:
        from mtrain.cli.main import app  # this and the trainer take ten seconds to import: signals must be held by now

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
    """Ends the process at once.

    Python's own exit would wait for threads; and where Ctrl-C has interrupted code in `exec` or `eval`, such as the
    definition of a data class, it would end as if SIGINT had killed it, whatever exit code was wanted."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
