"""Output of `mtrain verify`: on the terminal, and as files."""

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from mtrain.base.files import disk_faults, write_atomically
from mtrain.verify.core.result import Deviation, ParityReport, Report, TimedReport

_UNBOUNDED = 10_000


def print_report(report: Report, folder: Path, output: Console) -> None:
    """Prints the table, the tolerances, the diagnosis and the verdict, with the report's files in `folder`."""
    text = report.text
    _print_table(report, output)
    output.print()
    for tolerance in report.tolerances:
        inputs = [f"{name} = {value:.6g}" for name, value in tolerance.inputs.items()]
        origin = ", ".join(filter(None, [tolerance.formula, *inputs]))
        output.print(escape(f"tolerance of {tolerance.kind}: {tolerance.value:.1e}{origin and f' = {origin}'}"))
    if isinstance(report, ParityReport):
        output.print(escape(report.judged), soft_wrap=True)
    for layout in report.layouts:
        if messages := [*layout.guards, *([layout.error] if layout.error else [])]:
            more = f" (and {len(messages) - 1} more in {text.json_name})" if len(messages) > 1 else ""
            output.print(escape(f"{layout.name}: {messages[0]}{more}"), soft_wrap=True)
    if isinstance(report, TimedReport):
        for line in (*report.times, *(f"{name}: not compared: {why}" for name, why in report.left_out.items())):
            output.print(escape(line), soft_wrap=True)
    if report.diagnosis is not None:
        output.print()
        for line in report.diagnosis.lines:
            output.print(escape(line), soft_wrap=True)
    output.print()
    files = f"{folder / text.json_name}, {folder / text.page_name}"
    output.print(escape(f"{_verdict(report)}; {files}"), soft_wrap=True)


def write_report(report: Report, folder: Path) -> None:
    """Writes the JSON file and the page; raises MachineError if the folder cannot be written."""
    from mtrain.report.pages.html import write_page  # here, to load matplotlib only if a page is written
    from mtrain.verify.report.page import report_page

    content = report.to_json()  # not below, where our own error would be blamed on the disk
    with disk_faults(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / report.text.json_name, content)
    write_page(folder / report.text.page_name, report_page(report))


def _verdict(report: Report) -> str:
    planted = f" with the planted fault {report.injected}" if report.injected else ""
    if report.verdict == "UNFINISHED":
        return f"UNFINISHED: {report.unfinished}{planted}"
    return f"{report.verdict}: {report.in_words(report.text.agreement)}{planted}"


def _print_table(report: Report, output: Console) -> None:
    """Prints the table uncut; on a narrow terminal the names of tensors follow on separate lines."""
    table = _table(report, is_boxed=output.is_terminal, has_tensors=report.compares_tensors)
    is_narrow = output.is_terminal and _width(table, output) > output.width
    if is_narrow:
        table = _table(report, is_boxed=False, has_tensors=False)
    table.width = _width(table, output)
    output.print(table, soft_wrap=True)
    for layout in report.layouts if is_narrow else ():
        if (worst := layout.worst_tensor()) is not None:
            output.print(escape(f"worst tensor of {layout.name}: {_in_words(worst)}"), soft_wrap=True)


def _width(table: Table, output: Console) -> int:
    """Returns the width of a table in characters on an unlimited terminal."""
    return Measurement.get(output, output.options.update(max_width=_UNBOUNDED), table).maximum


def _table(report: Report, *, is_boxed: bool, has_tensors: bool) -> Table:
    title = escape(f"{report.text.caption}: {report.data}")
    table = Table(title=title, title_justify="left", pad_edge=False, box=Table().box if is_boxed else None)
    table.add_column(report.text.noun, no_wrap=True)
    for name in ("ranks", *report.columns):
        table.add_column(name, justify="right", no_wrap=True)
    if has_tensors:
        table.add_column("worst tensor", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for layout in report.layouts:
        worst = layout.worst_tensor()
        tensor = ["-" if worst is None else escape(_in_words(worst))] if has_tensors else []
        verdict = "[green]pass[/green]" if layout.passed else "[red]FAIL[/red]"
        kinds = [_cell(layout.worst(*kinds)) for kinds in report.columns.values()]
        table.add_row(escape(layout.name), str(layout.num_ranks), *kinds, *tensor, verdict)
    return table


def _cell(deviation: Deviation | None) -> str:
    if deviation is None:
        return "-"
    text = "0" if deviation.value == 0 else f"{deviation.value:.1e}"
    text = text if math.isfinite(deviation.value) else "not finite"
    return text if deviation.passed else f"[red]{text} ![/red]"


def _in_words(worst: Deviation) -> str:
    return f"{worst.kind} of {worst.name}, step {worst.step}"
