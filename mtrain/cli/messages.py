"""How a verb ends where something is wrong: one message and an exit code, or a traceback that names its rank."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from mtrain.base.errors import MtrainError
from mtrain.base.signals import was_interrupted


@contextmanager
def one_message(rank: int = 0) -> Iterator[None]:
    """Ends the program with the error's exit code, and its message where this rank is the one to show it.

    Args:
        rank: This rank, of a verb that runs as ranks of one world; any other verb speaks wherever it is called, be it
            in an environment that a launcher has made.
    """
    try:
        yield
    except MtrainError as error:
        text = _summary_of(error)
        if text is None and (rank == 0 or not error.on_every_rank) and not error.is_shown_elsewhere:
            text = f"error: {'' if rank == 0 else f'[rank {rank}] '}{error}\n"
        with suppress(OSError):  # nobody may read it any more
            sys.stdout.flush()  # what was printed before the error stands before it in a log of both
        print(text or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:  # else typer says so in its own way; the program's end says it in ours
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def prefixed_traceback() -> Iterator[None]:
    """Shows the traceback of what was not foreseen, each line with the rank, since the ranks' lines may mix."""
    try:
        yield
    except MtrainError:
        raise
    except Exception as error:
        if was_interrupted():  # a library has made another exception of it
            raise KeyboardInterrupt from None
        lines = traceback.format_exc().splitlines()
        print("\n".join(f"[rank {this_rank()}] {line}" for line in lines), file=sys.stderr, flush=True)
        print(_summary_of(error) or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


def _summary_of(error: Exception) -> str | None:
    """The summary, where this process has to show it; empty where the local launcher will; None where there is none."""
    from mtrain.runs.failure import REPORT_TO, reported_summary  # nothing has failed yet where verbs start

    summary = reported_summary(error)
    if summary is None or {"MTRAIN_LAUNCH", REPORT_TO} & os.environ.keys():
        return summary and ""
    return summary if not {"RANK", "SLURM_PROCID"} & os.environ.keys() else None


def this_rank() -> int:
    """This rank for messages, even where the environment is not fit for a run."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(text) if text.isdecimal() else 0
