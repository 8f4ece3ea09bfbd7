"""Entry point of `mtrain` and `python -m mtrain`; imports nothing heavy before stop signals are safe."""

import contextlib
import errno
import io
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

from mtrain.base.background import is_anything_running
from mtrain.base.signals import end_at_interrupt, hold_stop_signals, ignore_stop_signals, was_interrupted

_VERBS_THAT_SAVE = (["train"], ["launch", "local"])
"""Verbs that survive a stop signal during their start, and a full disk under their log."""


_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Runs the command line."""
    saves = any(sys.argv[1 : 1 + len(words)] == words for words in _VERBS_THAT_SAVE)
    if saves:
        hold_stop_signals()
        survive_full_disks()
    else:
        end_at_interrupt()
    # not in training, which may run a user's code with plugins, nor in `launch`, whose environment the job inherits
    if sys.argv[1:2] not in (["train"], ["launch"]):
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # else pydantic reads the metadata of each package
    try:
        from mtrain.cli.main import app  # this and the trainer take ten seconds to import, so signals are held before

        app(prog_name="mtrain")
    except BaseException as ending:
        if was_interrupted() or isinstance(ending, KeyboardInterrupt):  # even if a library raised another exception
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                verb = " ".join(["mtrain", *sys.argv[1:2]])
                print(f"interrupted: {verb} has not finished", file=sys.stderr, flush=True)
            _leave(_INTERRUPTED)
        if isinstance(ending, SystemExit) and saves and is_anything_running():
            _leave(ending.code if isinstance(ending.code, int) else 0)
        raise
    finally:
        if saves:
            ignore_stop_signals()


def _leave(code: int) -> NoReturn:
    """Ends the process immediately.

    Python's own exit would wait for threads; and if Ctrl-C interrupted code in `exec` or `eval`, such as the definition
    of a data class, the process would end as if killed by SIGINT, whatever the exit code."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Output(io.FileIO):
    """Stream to a file descriptor that accepts writes even while the disk is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._num_missing_bytes = 0

    def write(self, data: Any) -> int:
        """Writes some of the data, or counts all of it as missing; returns the number of bytes dealt with."""
        try:
            if self._num_missing_bytes:
                super().write(f"[{self._num_missing_bytes} bytes are missing here: the disk was full]\n".encode())
                self._num_missing_bytes = 0
            return super().write(data)
        except OSError as fault:
            if fault.errno not in _FULL:
                raise
            self._num_missing_bytes += len(data)
            return len(data)


def survive_full_disks() -> None:
    """Lets standard output and standard error survive a full disk; call it once, at the start of a process.

    The logs of ranks and of Slurm jobs are files, often in the run folder. A line that cannot be written must not end a
    run or change its exit code, so it is dropped, and a later line says how many bytes are missing.
    """
    sys.stdout = _replaced(sys.stdout)
    sys.stderr = _replaced(sys.stderr)


def _replaced(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # not a file, or closed: nothing to survive
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


if __name__ == "__main__":
    main()
