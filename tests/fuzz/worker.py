"""A process that reads fuzzed inputs one after the other: python -m tests.fuzz.worker TARGET SEED FIRST LAST

It is a separate process, since an input may hang it, crash it or take its memory. It writes one line of JSON for each
input to its standard output; output of the code under test is discarded.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from tests.fuzz.target import Target, judge, load_target, write_input

_SPARE_BYTES = 2 * 2**30
"""Address space beyond that of the imported program, in bytes."""


def main(name: str, seed: int, first: int, last: int) -> None:
    """Reads inputs `first` to `last` - 1."""
    report = _reserved_output()
    target = load_target(name)
    _limit_memory()
    for index in range(first, last):
        _limit_time(target.cpu_seconds)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            print(json.dumps(_one(target, Path(folder), seed, index)), file=report, flush=True)


def _one(target: Target, folder: Path, seed: int, index: int) -> tuple[str, str]:
    write_input(target, folder, seed, index)
    return judge(target, folder)


def _reserved_output() -> TextIO:
    """Returns the standard output, to which nothing else has access from now on."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return report


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds  # rounded down, it could begin with a hundredth left
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
