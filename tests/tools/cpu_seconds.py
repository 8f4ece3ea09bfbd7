"""Measures the processor time of each test, including its ranks and commands, and the time that it takes.

Wall time means little where other programs run next to the tests. Each worker appends one line per test to a file, from
which the sums of folders, the most expensive files and tests and the longest waits follow:

    python -m pytest -p tests.tools.cpu_seconds --cpu-seconds=cpu.txt tests/parity
    python -m tests.tools.cpu_seconds cpu.txt
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest


def tree_seconds(process: psutil.Process) -> float:
    """Sums the processor seconds of a process and its descendants; ended ones are included in their parent's."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:  # it ended meanwhile: the process that waits for it has its time
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that names the file."""
    parser.addoption("--cpu-seconds", help="file for one line a test: processor seconds, seconds and name")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures setup, call and teardown of one test; a fixture of a whole file counts for the file's first test."""
    process = psutil.Process()
    before, begin = tree_seconds(process), time.monotonic()
    result = yield
    if path := item.config.getoption("--cpu-seconds"):
        with Path(path).open("a") as file:  # one short write each, so lines of several workers stay whole
            file.write(f"{tree_seconds(process) - before:.2f} {time.monotonic() - begin:.2f} {item.nodeid}\n")
    return result


def sums(lines: list[str], parts: int) -> Mapping[str, tuple[float, int]]:
    """Sums seconds and number of tests by the first `parts` parts of their paths, the most expensive first."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        seconds, _, name = line.split(" ", 2)
        found["/".join(name.split("::")[0].split("/")[:parts])].append(float(seconds))
    ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
    return {name: (sum(each), len(each)) for name, each in ordered}


def main() -> None:
    """Prints the sums of a file."""
    lines = Path(sys.argv[1]).read_text().splitlines()
    for parts, most in ((2, 100), (3, 40), (9, 80)):
        print(f"\n{'CPU s':>8} {'tests':>6}")
        for name, (seconds, number) in list(sums(lines, parts).items())[:most]:
            print(f"{seconds:8.1f} {number:6d} {name}")
    print(f"\n{'waits s':>8}")
    waits = sorted(((float(line.split(" ", 2)[1]) - float(line.split(" ", 1)[0])), line) for line in lines)
    for seconds, line in reversed(waits[-80:]):
        print(f"{seconds:8.1f} {line.split(' ', 2)[2]}")
    print(f"\n{sum(float(line.split()[0]) for line in lines):8.1f} {len(lines):6d} all")


if __name__ == "__main__":
    main()
