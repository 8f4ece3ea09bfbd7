"""Runs many mutated inputs of a target and collects what breaks its promise."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from tests.fuzz.target import Outcome, load_target, write_input
from tests.paths import ROOT

WALL_SECONDS = 150.0
"""Wall time of one input in seconds, including the start of the process: for inputs that wait without processor
time."""


class Finding(NamedTuple):
    """An input that breaks the promise."""

    number: int
    """Number of the input under the seed."""
    text: str

    @property
    def cause(self) -> str:
        """Returns a text that is equal for inputs that break the promise in the same way: what happened, and the last
        place of the traceback."""
        lines = self.text.splitlines()
        places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        return f"{lines[0]} {places[-1] if places else ''}"


@dataclass
class Findings:
    """Counts and findings of one campaign."""

    accepted: int = 0
    refused: int = 0
    found: list[Finding] = field(default_factory=list)

    def add(self, index: int, outcome: Outcome) -> None:
        """Counts one input."""
        match outcome.kind:
            case "accepted":
                self.accepted += 1
            case "refused":
                self.refused += 1
            case "finding":
                self.found.append(Finding(index, outcome.text))


def fuzz(
    name: str,
    examples: int,
    seed: int,
    first: int = 0,
    tell: Callable[[int, Outcome], None] = lambda index, outcome: None,
) -> Findings:
    """Reads inputs `first` to `first + examples` - 1 of a seed.

    Args:
        name: Name of a target, as `load_target` takes it.
        examples: Number of inputs.
        seed: Seed of the inputs.
        first: Number of the first input, to repeat a finding.
        tell: Function that is called after each input.
    """
    findings, index, last = Findings(), first, first + examples
    while index < last:
        for outcome in _worker(name, seed, index, last):
            findings.add(index, outcome)
            tell(index, outcome)
            index += 1
    return findings


def keep_input(name: str, seed: int, index: int, folder: Path) -> None:
    """Writes one input into a folder, for inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    write_input(load_target(name), folder, seed, index)


def _worker(name: str, seed: int, first: int, last: int) -> Iterator[Outcome]:
    """Yields outcomes from one process; the last of them may be its death."""
    command = [sys.executable, "-m", "tests.fuzz.worker", name, *map(str, (seed, first, last))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, bufsize=0, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors
        )  # without a buffer, in which a line would be hidden from select
        try:
            for _ in range(first, last):
                yield _next(process, errors)
                if process.poll() not in (None, 0):
                    return
        finally:
            process.kill()
            process.communicate()


def _next(process: subprocess.Popen[bytes], errors: IO[bytes]) -> Outcome:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], WALL_SECONDS)[0]:
        process.kill()
        process.wait()
        return Outcome("finding", f"no answer in {WALL_SECONDS:.0f} s")
    if line := process.stdout.readline():
        return Outcome(*json.loads(line))
    code = process.wait()
    if code == -signal.SIGXCPU:
        return Outcome("finding", "too much processor time")
    errors.seek(0)
    return Outcome("finding", f"the process ended with {code}\n{errors.read().decode(errors='replace')}")
