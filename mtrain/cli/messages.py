"""The end of a verb after an error: one message and an exit code, or a traceback whose lines name the rank."""

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
    """Ends the program with the error's exit code, and prints the error's message if this rank has to show it.

    Args:
        rank: Rank of this process, for verbs whose ranks form one world; other verbs use 0 and always print, even in a
            launcher's environment.
    """
    try:
        yield
    except MtrainError as error:
        text = _summary_of(error)
        if text is None and (rank == 0 or not error.on_every_rank) and not error.is_shown_elsewhere:
            text = f"error: {'' if rank == 0 else f'[rank {rank}] '}{error}\n"
        with suppress(OSError):  # the reader of a pipe may be gone
            sys.stdout.flush()  # so that earlier output comes first in a log of both streams
        print(text or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:  # otherwise typer prints its own message; the end of the program prints ours
        raise typer.Exit(128 + signal.SIGINT) from None


@contextmanager
def prefixed_traceback() -> Iterator[None]:
    """Prints the traceback of an unexpected error with the rank on each line, since lines of several ranks may mix."""
    try:
        yield
    except MtrainError:
        raise
    except Exception as error:
        if was_interrupted():  # a library turned the interrupt into another exception
            raise KeyboardInterrupt from None
        lines = traceback.format_exc().splitlines()
        print("\n".join(f"[rank {this_rank()}] {line}" for line in lines), file=sys.stderr, flush=True)
        print(_summary_of(error) or "", end="", file=sys.stderr, flush=True)
        raise typer.Exit(1) from None


@dataclass
class _ReportFolder:
    """Folder of a verb's report, until it is known the system's temporary folder."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))


@contextmanager
def one_verdict(verb: str) -> Iterator[_ReportFolder]:
    """Reserves exit codes 0 and 1 for verdicts: an error that ends the block gets another code.

    The traceback of an unexpected error goes into the report's folder, which the block sets in the yielded object as
    soon as it is known.

    Raises:
        UnfinishedError: The block raised an unexpected error.
    """
    report = _ReportFolder()
    try:
        yield report
    except (typer.Exit, KeyboardInterrupt):
        raise
    except BaseException as error:
        if was_interrupted():  # a library turned the interrupt into another exception
            raise KeyboardInterrupt from None
        if isinstance(error, MtrainError) and error.exit_code > 1 and not hasattr(error, "__notes__"):
            raise
        where = _save_traceback(report.folder / f"{verb}-traceback.txt", error)
        raise UnfinishedError(
            f"mtrain verify {verb} did not finish and has no verdict: {reason_of(error)}; {where} has the traceback, "
            "which a bug report needs"
        ) from None


def _save_traceback(path: Path, error: BaseException) -> str:
    """Writes a traceback to a file, or to standard error if that fails; returns the path or `standard error`."""
    text = "".join(traceback.format_exception(error))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        print(text, end="", file=sys.stderr, flush=True)
        return "standard error"
    return str(path)


def _summary_of(error: Exception) -> str | None:
    """Returns the failure's summary if this process has to show it, "" if the launcher will, None without a summary."""
    from mtrain.runs.failure import REPORT_TO, reported_summary  # here, because only failures need it

    summary = reported_summary(error)
    if summary is None:
        return None
    if {"MTRAIN_LAUNCH", REPORT_TO} & os.environ.keys():
        return ""
    return summary if not {"RANK", "SLURM_PROCID"} & os.environ.keys() else None


def this_rank() -> int:
    """Returns this rank for messages; 0 if the environment has no valid rank."""
    text = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return int(text) if text.isdecimal() else 0
