"""How a verb ends after an error: one message and an exit code, or a traceback whose lines name the rank."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer

from mtrain.base.errors import MtrainError, UnfinishedError, reason_of
from mtrain.base.signals import was_interrupted


@contextmanager
def one_message(rank: int = 0) -> Iterator[None]:
    """Ends the program with the error's exit code, and prints its message if this rank has to show it.

    Args:
        rank: Rank of this process, for a verb whose ranks form one world; other verbs always print their messages, also
            in a launcher's environment.
    """
    try:
        yield
    except MtrainError as error:
        text = _summary_of(error)
        if text is None and (rank == 0 or not error.on_every_rank) and not error.is_shown_elsewhere:
            text = f"error: {'' if rank == 0 else f'[rank {rank}] '}{error}\n"
        with suppress(OSError):  # nobody may read it any more
            sys.stdout.flush()  # so that a log of both streams has the earlier output first
        print(text or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:  # else typer prints its own message; the program's end prints ours
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def prefixed_traceback() -> Iterator[None]:
    """Shows the traceback of an unexpected error, with the rank on each line, since the lines of ranks may mix."""
    try:
        yield
    except MtrainError:
        raise
    except Exception as error:
        if was_interrupted():  # a library has turned it into another exception
            raise KeyboardInterrupt from None
        lines = traceback.format_exc().splitlines()
        print("\n".join(f"[rank {this_rank()}] {line}" for line in lines), file=sys.stderr, flush=True)
        print(_summary_of(error) or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


@dataclass
class _Place:
    """Folder of a verb's report."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))


@contextmanager
def one_verdict(verb: str) -> Iterator[_Place]:
    """Reserves exit codes 0 and 1 for verdicts: any error that ends the block gets another code.

    The traceback of an unexpected error is written into the report's folder, which the block sets in the yielded object
    as soon as it is known.

    Raises:
        UnfinishedError: The block raised an unexpected error.
    """
    place = _Place()
    try:
        yield place
    except (typer.Exit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if was_interrupted():  # a library has turned it into another exception
            raise KeyboardInterrupt from None
        if isinstance(error, MtrainError) and error.exit_code > 1 and not hasattr(error, "__notes__"):
            raise
        where = _kept_traceback(place.folder / f"{verb}-traceback.txt", error)
        raise UnfinishedError(
            f"mtrain verify {verb} could not be finished and has no verdict: {reason_of(error)}; {where} has the "
            "traceback, which a bug report needs"
        ) from None


def _kept_traceback(path: Path, error: BaseException) -> str:
    """Writes a traceback into a file, or on standard error if that fails; returns the name of the place."""
    text = "".join(traceback.format_exception(error))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        print(text, end="", file=sys.stderr, flush=True)
        return "standard error"
    return str(path)


def _summary_of(error: Exception) -> str | None:
    """Returns the summary if this process has to show it; "" if the local launcher will; None without one."""
    from mtrain.runs.failure import REPORT_TO, reported_summary  # only here: a verb that starts has no failure yet

    summary = reported_summary(error)
    if summary is None or {"MTRAIN_LAUNCH", REPORT_TO} & os.environ.keys():
        return summary and ""
    return summary if not {"RANK", "SLURM_PROCID"} & os.environ.keys() else None


def this_rank() -> int:
    """Returns this rank for messages, even if the environment is not valid for a run."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(text) if text.isdecimal() else 0
