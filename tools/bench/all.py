"""Runs every benchmark of docs/performance.md and writes its table: `python tools/bench/all.py --json FILE`.

Each command measures its contenders in one run, in turns, and prints ratios of medians; the table has what `rows.py`
finds there. A GPU's rows come from report.json of `tools/bench/gpu.py`. `--small` tries all commands in some minutes
and writes no page.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.rows import GPU_ROWS, ROWS, GpuRow, Row

BENCH = Path(__file__).parent
PAGE = BENCH.parents[1] / "docs/performance.md"
BEGIN, END = "<!-- written by tools/bench/all.py -->", "<!-- end -->"
HEAD = "| figure | beside | must | bold | measured | |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Result:
    """Of one row."""

    row: Row | GpuRow
    figure: float | None
    reason: str = ""
    """Why there is no figure."""

    @property
    def verdict(self) -> str:
        """Bold, met, missed, or why nothing is known."""
        return self.reason if self.figure is None else self.row.verdict(self.figure)


def output_of(row: Row, is_small: bool) -> str:
    """What the command of a row prints.

    Raises:
        RuntimeError: It is not there, or ended with another exit code than 0.
    """
    script, *options = row.command
    if not (BENCH / script).exists():
        raise RuntimeError(f"tools/bench/{script} is not there")
    launcher = [sys.executable]
    if row.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.ranks)]
    with tempfile.TemporaryDirectory() as place:
        given = [each.replace("{folder}", f"{place}/new") for each in options]
        command = [*launcher, str(BENCH / script), *given, *(row.small if is_small else ())]
        environment = os.environ | {"PYTHONPATH": str(BENCH.parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script} ended with exit code {done.returncode}: {_reason(done.stderr)}")
    return done.stdout


def _reason(stderr: str) -> str:
    """The error that a program or one of its ranks raised; else the end of what it said."""
    errors = [line for line in stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    # the first: what torchrun says about a rank that failed comes after the rank's own words
    return errors[0] if errors else stderr.strip()[-300:]


def measured(rows: Sequence[Row], is_small: bool) -> list[Result]:
    """Every row; a command that several have runs once."""
    outputs: dict[tuple[str, ...], str] = {}
    found = []
    for row in rows:
        start = time.perf_counter()
        try:
            if row.command not in outputs:
                outputs[row.command] = output_of(row, is_small)
            figure = row.figure(outputs[row.command])
            result = Result(row, figure, "" if figure is not None else "the output has no such figure")
        except RuntimeError as error:
            result = Result(row, None, str(error))
        print(
            f"{row.name} / {row.contender}: {result.figure} {result.verdict} ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
        found.append(result)
    return found


def of_gpu(report: Mapping[str, Any] | None) -> list[Result]:
    """Rows of a report of tools/bench/gpu.py; without one they are said to need a GPU."""
    if report is None:
        return [Result(row, None, "needs a GPU") for row in GPU_ROWS]
    if report["machine"]["tiny"]:
        raise typer.BadParameter("the report is of small shapes, whose speeds mean nothing; run gpu.py without --tiny")
    found = []
    for row in GPU_ROWS:
        section, *keys = row.path
        answer = report["sections"].get(section, {"error": "left out", "found": {}})
        value = answer["found"]
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        found.append(Result(row, value, "" if value is not None else answer.get("error", "not in the report")))
    return found


def table(results: Sequence[Result], machine: str) -> str:
    """Markdown: a line for each row."""
    lines = [f"Measured on: {machine}.", "", HEAD]
    for each in results:
        row = each.row
        value = "" if each.figure is None else f"{each.figure:.3g}"
        reason = " ".join(each.verdict.replace("|", "/").split())[:160]
        lines.append(f"| {row.name} | {row.contender} | {row.must:g} | {row.bold:g} | {value} | {reason} |")
    return "\n".join(lines)


def written(page: str, content: str) -> str:
    """The page with another table.

    Raises:
        ValueError: It has no place for one.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs a line {BEGIN} and a line {END} behind it")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="file for all figures")] = None,
    gpu_report: Annotated[Path | None, typer.Option(help="report.json of tools/bench/gpu.py")] = None,
    only: Annotated[str, typer.Option(help="rows whose name or command has this; the page is not written")] = "",
    small: Annotated[bool, typer.Option("--small", help="tries the commands; the page is not written")] = False,
) -> None:
    """Runs the commands; exit code 1 where one fails."""
    report = None if gpu_report is None else json.loads(gpu_report.read_text())
    wanted = [row for row in ROWS if only in f"{row.name} {' '.join(row.command)}"]
    results = [*measured(wanted, small), *([] if only else of_gpu(report))]
    device = "" if report is None else f"; GPU rows on {report['machine']['device']}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}{device}"
    text = table(results, machine)
    if not small and not only:
        PAGE.write_text(written(PAGE.read_text(), text))
    print(text)
    if json_path is not None:
        rows = [{**vars(each.row), "figure": each.figure, "verdict": each.verdict} for each in results]
        json_path.write_text(json.dumps({"machine": machine, "small": small, "rows": rows}, indent=1))
    failed = [each for each in results if each.figure is None and isinstance(each.row, Row)]
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
