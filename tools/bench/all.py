"""Runs every benchmark of docs/proof/performance.md and writes its table: `python tools/bench/all.py --json FILE`.

Each command measures its contenders in one run, in turns, and prints ratios of medians; the table has what `rows.py`
finds there. A GPU's rows come from report.json of `tools/bench/gpu.py`. `--small` tries all commands in some minutes
and writes no page.

Rows can be measured in parts (`--only`, `--minutes`, `--missing`): what an earlier part measured on the same machine,
in FILE or on the page, stays. Both are written after every row, so that an interrupted run loses nothing.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.rows import GPU_ROWS, ROWS, GpuRow, Row

BENCH = Path(__file__).parent
PAGE = BENCH.parents[1] / "docs/proof/performance.md"
BEGIN, END = "<!-- written by tools/bench/all.py -->", "<!-- end -->"
GPU = "; GPU rows on "
HEAD = "| figure | compared with | must | bold | measured | |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Result:
    """Result of one row."""

    row: Row | GpuRow
    figure: float | None
    reason: str = ""
    """Reason why there is no figure."""
    seconds: float = 0.0
    """Time that its command took; 0 where another row ran it."""

    @property
    def key(self) -> tuple[str, str]:
        """Key of its row: name and contender."""
        return self.row.name, self.row.contender

    @property
    def verdict(self) -> str:
        """Verdict (bold, met or missed), or the reason why there is none."""
        return self.reason if self.figure is None else self.row.verdict(self.figure)


def output_of(row: Row, is_small: bool) -> str:
    """Runs the command of a row and returns its output.

    Raises:
        RuntimeError: The script is not there, or ended with another exit code than 0.
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
    """Returns the error that a program or one of its ranks raised; else the end of its output."""
    errors = [line for line in stderr.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    # the first: torchrun's report on a failed rank comes after the rank's own message
    return errors[0] if errors else stderr.strip()[-300:]


def measured(rows: Sequence[Row], is_small: bool, minutes: float | None = None) -> Iterator[Result]:
    """Measures every row; a command that several rows share runs once.

    Args:
        rows: Rows in their order.
        is_small: Whether to add the options with which a command takes seconds.
        minutes: Minutes after which no further command begins; its rows are left out. None sets no limit.
    """
    outputs: dict[tuple[str, ...], str] = {}
    began = time.perf_counter()
    for row in rows:
        start, is_up = time.perf_counter(), minutes is not None and time.perf_counter() - began > 60 * minutes
        if is_up and row.command not in outputs:
            continue
        try:
            if row.command not in outputs:
                outputs[row.command] = output_of(row, is_small)
            figure, reason = row.figure(outputs[row.command]), "the output has no such figure"
        except RuntimeError as error:
            figure, reason = None, str(error)
        result = Result(row, figure, reason * (figure is None), time.perf_counter() - start)
        print(f"{row.name} / {row.contender}: {figure} {result.verdict} ({result.seconds:.0f} s)", flush=True)
        yield result


def of_gpu(report: Mapping[str, Any]) -> list[Result]:
    """Returns the rows of a report of tools/bench/gpu.py."""
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
    """Formats the results as Markdown, one line per row."""
    lines = [f"Measured on: {machine}.", "", HEAD]
    for each in results:
        row = each.row
        value = "" if each.figure is None else f"{each.figure:.3g}"
        reason = " ".join(each.verdict.replace("|", "/").split())[:160]
        lines.append(f"| {row.name} | {row.contender} | {row.must:g} | {row.bold:g} | {value} | {reason} |")
    return "\n".join(lines)


def written(page: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Returns the page with a new table between two lines.

    Raises:
        ValueError: The page has no place for a table.
    """
    before, found, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not found or not last:
        raise ValueError(f"the page needs a line {begin} and a line {end} after it")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


NOT_YET = "not measured on this machine yet"


@dataclass(frozen=True)
class Earlier:
    """Figures of an earlier measurement."""

    machine: str
    """Machine that they were measured on, with the GPU where there are rows of one."""
    figures: Mapping[tuple[str, str], float]
    """Figure by name and contender, for rows that have one."""

    @property
    def gpu(self) -> str:
        """Part of `machine` that names the GPU."""
        _, begin, device = self.machine.partition(GPU)
        return begin + device


def of_page(page: str) -> Earlier:
    """Reads the figures of a page's table."""
    content = page.partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in content.splitlines() if line[:1] == "|"]
    figures = {(cells[0], cells[1]): float(cells[4]) for cells in rows[2:] if len(cells) == 6 and cells[4]}
    found = re.search(r"^Measured on: (.*)\.$", content, re.MULTILINE)
    return Earlier(found[1] if found else "", figures)


def of_file(path: Path) -> Earlier:
    """Reads the figures that an earlier part wrote with `--json`.

    Raises:
        typer.BadParameter: The figures are of small sizes.
    """
    content = json.loads(path.read_text())
    if content["small"]:
        raise typer.BadParameter(f"{path} has figures of --small, which mean nothing; name another file")
    figures = {(row["name"], row["contender"]): row["figure"] for row in content["rows"] if row["figure"] is not None}
    return Earlier(content["machine"], figures)


def earlier(json_path: Path | None, machine: str, is_part: bool) -> Earlier:
    """Reads earlier figures from the file if there is one, else from the page; drops those of another machine.

    Raises:
        typer.BadParameter: The figures are of another machine, and only a part of the rows would be measured.
    """
    is_new = json_path is None or not json_path.exists()
    found = of_page(PAGE.read_text()) if json_path is None or is_new else of_file(json_path)
    if not found.figures or found.machine.partition(GPU)[0] == machine:
        return found
    if is_part and not (is_new and json_path is not None):
        raise typer.BadParameter(
            f"{PAGE.name if is_new else json_path} has figures of {found.machine}, and this is {machine}: a part of "
            "the rows cannot be mixed with them; measure all rows, or name a new file by --json"
        )
    print(f"figures of {found.machine} are left out")
    return Earlier("", {})


def merged(results: Sequence[Result], before: Earlier) -> list[Result]:
    """Returns all rows in their order: with the new result, else the earlier figure."""
    now = {each.key: each for each in results}
    rows: list[Row | GpuRow] = [*ROWS, *GPU_ROWS]
    merged = []
    for row in rows:
        key = (row.name, row.contender)
        figure = before.figures.get(key)
        reason = NOT_YET if isinstance(row, Row) else "needs a GPU"
        merged.append(now.get(key) or Result(row, figure, reason * (figure is None)))
    return merged


def write(results: Sequence[Result], machine: str, json_path: Path | None, is_small: bool) -> None:
    """Writes the page, except for small sizes, and the file."""
    if not is_small:
        PAGE.write_text(written(PAGE.read_text(), table(results, machine)))
    if json_path is not None:
        rows = [
            {**vars(each.row), "figure": each.figure, "verdict": each.verdict, "seconds": each.seconds}
            for each in results
        ]
        json_path.write_text(json.dumps({"machine": machine, "small": is_small, "rows": rows}, indent=1))


def chosen(only: str, missing: bool, before: Earlier) -> list[Row]:
    """Returns the rows to measure."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    named = [row for row in ROWS if not words or any(word in f"{row.name} {' '.join(row.command)}" for word in words)]
    if not named:
        raise typer.BadParameter(f"--only {only}: no row or command has this; see tools/bench/rows.py")
    return [row for row in named if not (missing and (row.name, row.contender) in before.figures)]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="file for all figures; parts are added")] = None,
    gpu_report: Annotated[Path | None, typer.Option(help="report.json of tools/bench/gpu.py")] = None,
    only: Annotated[str, typer.Option(help="rows whose name or command has one of these, between commas")] = "",
    missing: Annotated[bool, typer.Option("--missing", help="rows that no earlier part has measured")] = False,
    minutes: Annotated[float | None, typer.Option(help="after which no further command begins")] = None,
    small: Annotated[bool, typer.Option("--small", help="tries the commands; the page is not written")] = False,
) -> None:
    """Runs the commands; exit code 1 where one fails."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    is_part = bool(only or missing or minutes is not None)
    before = Earlier("", {}) if small else earlier(json_path, machine, is_part)
    report = None if gpu_report is None else json.loads(gpu_report.read_text())
    device = before.gpu if report is None else f"{GPU}{report['machine']['device']}"
    results = [] if report is None else of_gpu(report)
    wanted = chosen(only, missing, before)
    write(merged(results, before), machine + device, json_path, small)
    for result in measured(wanted, small, minutes):
        results.append(result)
        write(merged(results, before), machine + device, json_path, small)
    print(table(merged(results, before), machine + device))
    if left := len(wanted) - sum(isinstance(each.row, Row) for each in results):
        print(f"the time is up: {left} rows are left; go on with --missing")
    failed = [each for each in results if each.figure is None and isinstance(each.row, Row)]
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
