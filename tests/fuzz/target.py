"""The promise of a fuzzed piece of the program, and the check whether one mutated input breaks it.

A target is a module `tests/fuzz/<name>_target.py` with a constant TARGET. Adding the file is all it takes: the suite
runs a few of its inputs, `python tools/fuzz.py <name>` any number.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from mtrain.base.errors import MtrainError

_SUFFIX = "_target"
_MIB = 2**20
_LONGEST_LINE = 2000
_MOST_LINES = 100
"""Largest number of lines in a message, which is for a person."""


@dataclass(frozen=True)
class Target:
    """A reader of input from other programs."""

    write: Callable[[Path, Random], None]
    """Function that writes a mutated input into an empty folder."""
    read: Callable[[Path], None]
    """Function under test: returns where it accepts the folder's input, raises MtrainError where it refuses it."""
    exit_codes: frozenset[int]
    """Exit codes of the errors with which it may refuse."""
    cpu_seconds: int = 20
    """Processor seconds for one input; then the kernel ends the process with SIGXCPU. A busy machine does not count."""
    memory_mib: int = 256
    """Number of MiB by which one input may raise the largest resident memory of the process."""


class Outcome(NamedTuple):
    """Outcome of one input."""

    kind: Literal["accepted", "refused", "finding"]
    text: str
    """Text of the refusal, or of the fault with the traceback."""


def target_names() -> list[str]:
    """Lists the names of all targets."""
    return sorted(path.stem.removesuffix(_SUFFIX) for path in Path(__file__).parent.glob(f"*{_SUFFIX}.py"))


def load_target(name: str) -> Target:
    """Returns the target of a name, or of `package.module:CONSTANT`."""
    module, _, constant = (name if ":" in name else f"tests.fuzz.{name}{_SUFFIX}:TARGET").partition(":")
    target = getattr(importlib.import_module(module), constant)
    assert isinstance(target, Target), name
    return target


def write_input(target: Target, folder: Path, seed: int, index: int) -> None:
    """Writes input `index` of a seed."""
    target.write(folder, Random(f"{seed}/{index}"))


def judge(target: Target, folder: Path) -> Outcome:
    """Reads an input and says whether the promise holds: accepted, or one error of the right kind, in little memory."""
    before = _peak_mib()
    try:
        target.read(folder)
        outcome = Outcome("accepted", "")
    except MtrainError as error:
        outcome = _judged(error, target)
    except BaseException as error:  # even SystemExit and a panic of a library: all of them are findings
        outcome = Outcome("finding", f"{type(error).__name__}\n{traceback.format_exc(limit=-6)}")
    grown = _peak_mib() - before
    if grown > target.memory_mib and outcome.kind != "finding":
        return Outcome("finding", f"{grown} MiB of memory\n{outcome.kind}: {outcome.text[:_LONGEST_LINE]}")
    return outcome


def _judged(error: MtrainError, target: Target) -> Outcome:
    text = str(error)
    lines = text.splitlines()
    if error.exit_code not in target.exit_codes:
        return Outcome("finding", f"exit code {error.exit_code}\n{traceback.format_exc(limit=-6)}")
    if not text.strip() or "Traceback" in text or len(lines) > _MOST_LINES or max(map(len, lines)) > _LONGEST_LINE:
        return Outcome("finding", f"a message of {len(lines)} lines, {len(text)} characters\n{text[:_LONGEST_LINE]}")
    return Outcome("refused", text)


def _peak_mib() -> int:
    """Returns the largest resident memory of this program; getrusage would include that of the process that started
    it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 // _MIB
