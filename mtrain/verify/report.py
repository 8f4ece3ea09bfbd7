"""What `mtrain verify` prints and writes."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtrain.base.files import disk_faults, write_atomically
from mtrain.verify.core.result import Deviation, LayoutResult, Report

_PLAIN_WIDTH = 260
"""Characters of a line where the output is no terminal, so that no row is broken in two."""


def console() -> Console:
    """Standard output: a table on a terminal, plain lines elsewhere."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def print_report(report: Report, folder: Path) -> None:
    """The table, the tolerances, the diagnosis and the verdict."""
    output, wording = console(), report.wording
    output.print(_table(report, plain=not output.is_terminal))
    output.print()
    for tolerance in report.tolerances:
        inputs = [f"{name} = {value:.6g}" for name, value in tolerance.inputs.items()]
        origin = ", ".join([tolerance.formula, *inputs])
        output.print(escape(f"tolerance of {tolerance.kind}: {tolerance.value:.1e} = {origin}"))
    for layout in report.layouts:
        if said := [*layout.guards, *([layout.error] if layout.error else [])]:
            more = f" (and {len(said) - 1} more in {wording.json_name})" if len(said) > 1 else ""
            output.print(escape(f"{layout.name}: {said[0]}{more}"), soft_wrap=True)
    if report.diagnosis is not None:
        output.print()
        for line in report.diagnosis.lines:
            output.print(escape(line), soft_wrap=True)
    output.print()
    files = f"{folder / wording.json_name}, {folder / wording.page_name}"
    output.print(escape(f"{_verdict(report)}; {files}"), soft_wrap=True)


def write_report(report: Report, folder: Path) -> None:
    """Writes the JSON file and the page.

    Raises:
        MachineError: the folder cannot be written.
    """
    from mtrain.verify.page import write_page  # only where a page is written

    with disk_faults(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / report.wording.json_name, report.to_json())
    write_page(report, folder / report.wording.page_name)


def _verdict(report: Report) -> str:
    failed = sum(not layout.passed for layout in report.layouts)
    planted = f" with the planted fault {report.injected}" if report.injected else ""
    if failed:
        return f"FAIL: {failed} of {len(report.layouts)} {report.wording.disagreement}{planted}"
    return f"PASS: {len(report.layouts)} {report.wording.agreement}{planted}"


def _table(report: Report, plain: bool) -> Table:
    title = f"{report.wording.caption}: {report.data}"
    table = Table(title=title, title_justify="left", pad_edge=False, box=None if plain else Table().box)
    table.add_column(report.wording.noun, no_wrap=True)
    for name in ("ranks", *report.wording.columns):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst tensor")
    table.add_column("verdict", no_wrap=True)
    for layout in report.layouts:
        verdict = "[green]pass[/green]" if layout.passed else "[red]FAIL[/red]"
        kinds = [_cell(layout.worst(*kinds)) for kinds in report.wording.columns.values()]
        table.add_row(escape(layout.name), str(layout.num_ranks), *kinds, _worst_tensor(layout), verdict)
    return table


def _cell(deviation: Deviation | None) -> str:
    if deviation is None:
        return "-"
    text = "0" if deviation.value == 0 else f"{deviation.value:.1e}" if math.isfinite(deviation.value) else "not finite"
    return text if deviation.passed else f"[red]{text} ![/red]"


def _worst_tensor(layout: LayoutResult) -> str:
    worst = layout.worst_tensor()
    return "-" if worst is None else escape(f"{worst.kind} of {worst.name}, step {worst.step}")
