"""docs/proof/faults.md: the outcome of each injected fault, written by the tests that inject it.

`python -m tests.fault_table` runs every test marked `fault`, measures how long each fault takes to be noticed, and
writes the page; with files of tests or options of pytest it runs these alone and leaves all other rows as they are. A
test names its row and measures like this:

    @pytest.mark.fault("ranks", "kill -9 of a rank in a step", happens="the launcher names the rank", exit_code=5)
    def test_...(notice: Notice) -> None:
        run = start(...)
        with notice:  # from the fault until it is noticed
            kill(run); code = run.wait()
        assert code == notice.exit_code

`exit_code` is None where the run goes on. A parametrised test may mark each of its parameters with
`pytest.param(..., marks=pytest.mark.fault(...))`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "proof" / "faults.md"
COMMAND = "python -m tests.fault_table"
TIMES_VARIABLE = "MTRAIN_FAULT_TIMES"
"""Environment variable with the file to which each marked test appends its row; only this program sets it."""

AREAS = {
    "ranks": "Ranks and processes",
    "signals": "Signals and schedulers",
    "numbers": "Numbers",
    "checkpoints": "Checkpoints",
    "disk": "Disks",
    "input": "Configurations and data",
    "services": "Trackers",
    "clients": "Clients of a training service",
    "folders": "Folders of Hugging Face and tokenizers",
}
"""Area of a mark -> heading of the page."""

_ROW = re.compile(r"\| (.*) \| (.*) \| (goes on|-?\d+) \| `(.+)` \| (?:under 0\.1|(\d+\.\d)) s \|")


@dataclass(frozen=True)
class Row:
    """One injected fault."""

    area: str
    fault: str
    happens: str
    exit_code: int | None
    """Exit code of the run; None where it goes on."""
    test: str
    """Test as `tests/file.py::function`, without parameters."""

    @classmethod
    def of(cls, mark: pytest.Mark, node_id: str) -> Self:
        """Makes the row that a test's mark states."""
        area, fault = mark.args
        assert area in AREAS, f"{node_id}: area {area!r} is none of {', '.join(AREAS)}"
        assert mark.kwargs.keys() == {"happens", "exit_code"}, f"{node_id}: a fault needs happens= and exit_code="
        return cls(area, fault, mark.kwargs["happens"], mark.kwargs["exit_code"], node_id.split("[")[0])

    def cells(self) -> str:
        """Formats a line of the page, without the time."""
        code = "goes on" if self.exit_code is None else str(self.exit_code)
        return f"| {self.fault} | {self.happens} | {code} | `{self.test.removeprefix('tests/')}` |"


class Notice:
    """Measures the time from a fault until it is noticed."""

    def __init__(self, exit_code: int | None) -> None:
        """Args:
        Exit code that the mark promises, for the test to compare with.
        """
        self.exit_code = exit_code
        self.seconds: float | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._began


def measured(request: pytest.FixtureRequest) -> Iterator[Notice]:
    """Implements the fixture `notice`."""
    mark = request.node.get_closest_marker("fault")
    assert mark is not None, "the fixture `notice` belongs to tests marked `fault`"
    row = Row.of(mark, request.node.nodeid)
    notice = Notice(row.exit_code)
    yield notice
    assert notice.seconds is not None, "the test never measured the fault: with notice: ..."
    if file := os.environ.get(TIMES_VARIABLE):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(asdict(row) | {"seconds": notice.seconds}) + "\n")


def page(times: Iterable[tuple[Row, float]]) -> str:
    """Makes the page; with the longest time where a fault was injected several times."""
    slowest: dict[Row, float] = {}
    for row, seconds in times:
        slowest[row] = max(seconds, slowest.get(row, 0.0))
    parts = [
        f"""# Faults, each injected for real

<!-- Written by `{COMMAND}`, which runs the tests named below; a test compares. Change their marks, not this page. -->

{len(slowest)} faults. The exit code is that of the whole run; "goes on" means that training continues;
[bit for bit](../weights/checkpoints.md#bit-for-bit) it does on CPUs. Time to notice: from the fault until the message
or the end, as measured when this page was written, on 2 CPU cores, start of the processes included where the fault lies
in what they read.
"""
    ]
    for area, heading in AREAS.items():
        rows = sorted((row for row in slowest if row.area == area), key=lambda row: (row.test, row.fault))
        if rows:
            parts.append(f"\n## {heading}\n\n| fault | what happens | exit code | shown by | time to notice |")
            parts.append("|---|---|---|---|---|")
            parts += [f"{row.cells()} {_readable(slowest[row])} |" for row in rows]
    return "\n".join(parts) + "\n"


def rows(text: str) -> list[tuple[Row, float]]:
    """Reads what `page` has written: rows and their times, of which it shows a tenth of a second."""
    areas, area, found = {heading: area for area, heading in AREAS.items()}, "", []
    for line in text.splitlines():
        area = areas.get(line.removeprefix("## "), area)
        if cells := _ROW.fullmatch(line):
            fault, happens, code, test, seconds = cells.groups()
            exit_code = None if code == "goes on" else int(code)
            found.append((Row(area, fault, happens, exit_code, f"tests/{test}"), float(seconds or 0)))
    return found


def _readable(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else "under 0.1 s"


def main() -> int:
    """Runs the marked tests and writes the page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        command = [sys.executable, "-m", "pytest", "-m", "fault", *sys.argv[1:]]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, TIMES_VARIABLE: str(file)}).returncode
        if code:
            return code
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    measured_now = [(Row(**line), seconds) for line in lines if (seconds := line.pop("seconds")) is not None]
    ran = {row.test for row, _ in measured_now}
    kept = [each for each in rows(PAGE.read_text()) if each[0].test not in ran] if sys.argv[1:] else []
    PAGE.write_text(page([*kept, *measured_now]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
