"""Output of `mtrain compare`: lines, a table, a picture and a page for two runs; a table and pages for several."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mtrain.base.files import disk_faults, replacing, write_atomically
from mtrain.base.log import output_console
from mtrain.base.spelling import counted
from mtrain.config.changes import Change, flat_keys
from mtrain.report.compare.runs import Comparison, Quantity, compare_runs
from mtrain.report.metrics.plot import distinct_names, draw_curve, finish_axes, load_curves
from mtrain.report.metrics.record import StepRecord
from mtrain.report.metrics.shown import curve_colour
from mtrain.report.pages.charts import Curve, difference_chart, value_chart
from mtrain.report.pages.html import render
from mtrain.runs.folder import RunFolder

PAGE = "compare.html"


def comparison_page(comparison: Comparison) -> str:
    """Makes the page: verdict, quantities, curves, configuration, environment, in this order."""
    name_a, name_b = comparison.names
    first, last = comparison.steps[0], comparison.steps[-1]
    legend = [Curve("a", f"A: {name_a}", 0, ()), Curve("b", f"B: {name_b}", 1, ())]
    notes = [] if comparison.divergence is None else [f"First at {comparison.divergence}."]
    if comparison.expected is not None:
        notes.append(f"A difference is expected: {comparison.expected}.")
    notes.append(f"Tolerance: {comparison.allowed}, {comparison.allowed.reason}.")
    notes.append(
        f"{name_a} has recorded {counted(comparison.num_steps[0], 'step')}, {name_b} {comparison.num_steps[1]}."
    )
    notes += [f"Changed during the run, with consent: {change}." for change in comparison.key_changes]
    notes += [f"Tokens of {name}: {tokens}." for name, tokens in zip(comparison.names, comparison.tokens, strict=True)]
    return render(
        "comparison.html",
        comparison=comparison,
        headline=f"{name_a} and {name_b} over {counted(len(comparison.steps), 'step')}, {first} to {last}.",
        notes=notes,
        curves=legend,
        figures=[(quantity.name, _pictures(quantity, legend)) for quantity in comparison.quantities],
    )


def _pictures(quantity: Quantity, legend: Sequence[Curve]) -> list[tuple[str, str]]:
    """Returns (caption of the axis, chart) of the values and of their difference; the chart is empty if all are 0."""
    curves = [
        Curve(entry.key, entry.label, entry.slot, tuple(zip(quantity.steps, values, strict=True)))
        for entry, values in zip(legend, (quantity.a, quantity.b))
    ]
    values = value_chart(f"{quantity.name} of both runs by step", curves, ())
    if quantity.worst == 0:
        return [("by step", values), ("difference: exactly 0 in every step", "")]
    words = f"relative difference of the {quantity.name} by step, logarithmic, at most {quantity.worst:.1e}"
    points = tuple(zip(quantity.steps, quantity.differences, strict=True))
    differences = difference_chart(words, [Curve("difference", "difference", 2, points)], quantity.rtol)
    return [("by step", values), ("relative difference, by step", differences)]


def report_comparison(run_a: Path, run_b: Path, rtol: float | None, output: Path) -> bool:
    """Compares two runs, prints the result, and writes a page and a picture; returns whether they are equal."""
    comparison = compare_runs(run_a, run_b, rtol)
    page, picture = output / PAGE, output / "compare.png"
    with disk_faults(f"write the comparison to {output}"):
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(page, comparison_page(comparison))
        with replacing(picture) as new:
            comparison_picture(comparison).savefig(new, format="png")
    console = output_console(160)
    for name, value in _facts(comparison).items():
        console.print(f"[bold]{name:<15}[/bold]{escape(value)}", soft_wrap=True)
    rows = []
    for quantity in comparison.quantities:
        first, beyond = (quantity.first_step_beyond(rtol) for rtol in (0.0, quantity.rtol))
        cells = (f"{quantity.worst:.1e}", f"{quantity.rtol:.0e}", str(first or "none"), str(beyond or "none"))
        rows.append((quantity.name, *cells))
    headings = ("quantity", "worst difference", "tolerance", "first step not bit-equal", "first step beyond tolerance")
    _print_table(console, headings, rows, texts=("quantity",))
    console.print(page, picture, sep="\n", markup=False, soft_wrap=True)
    return comparison.divergence is None


def _facts(comparison: Comparison) -> dict[str, str]:
    names, counts, steps = comparison.names, comparison.num_steps, comparison.steps
    facts = {label: f"{name}, {counted(count, 'step')}" for label, name, count in zip("AB", names, counts, strict=True)}
    facts["compared"] = f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    facts |= {f"tokens of {label}": tokens for label, tokens in zip("AB", comparison.tokens, strict=True)}
    facts["configuration"] = _in_one_line([change for change in comparison.changes if not change.is_neutral])
    facts["neutral keys"] = _in_one_line([change for change in comparison.changes if change.is_neutral])
    if comparison.key_changes:
        facts["changed"] = "; ".join(comparison.key_changes)
    facts["environment"] = _in_one_line(comparison.environment)
    if comparison.unrecorded:
        facts["environment"] = f"not recorded by {' and '.join(comparison.unrecorded)}"
    facts["tolerance"] = f"{comparison.allowed}, {comparison.allowed.reason}"
    if comparison.expected is not None:
        facts["expected"] = f"a difference: {comparison.expected}"
    divergence = comparison.divergence
    facts["verdict"] = f"equal within {comparison.allowed}" if divergence is None else f"divergent from {divergence}"
    return facts


def _in_one_line(changes: Sequence[Change]) -> str:
    if not changes:
        return "the same"
    return ", ".join(f"{change.key}: {change.old or 'missing'} -> {change.new or 'missing'}" for change in changes)


def _print_table(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[str]
) -> None:
    """Prints rows, without borders if the output is not a terminal; columns in `texts` are aligned to the left."""
    table = Table(pad_edge=False)
    if not console.is_terminal:
        table.box = None
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def comparison_picture(comparison: Comparison) -> Figure:
    """Draws loss, gradient norm and denominator of both runs above their relative differences."""
    kinds = ("loss", "grad_norm", "denominator")
    panels = [next(quantity for quantity in comparison.quantities if quantity.kind == kind) for kind in kinds]
    figure = Figure(figsize=(9, 11), dpi=120, layout="constrained")
    *values, differences = figure.subplots(4, 1, sharex=True)
    name_a, name_b = comparison.names
    for axes, quantity in zip(values, panels, strict=True):
        draw_curve(axes, name_a, list(zip(quantity.steps, quantity.a, strict=True)), curve_colour(0))
        draw_curve(axes, name_b, list(zip(quantity.steps, quantity.b, strict=True)), curve_colour(1), dashed=True)
        finish_axes(axes, quantity.name, is_log=False)
    values[0].legend()
    _draw_differences(differences, panels, [comparison.allowed.loss, comparison.allowed.grad_norm])
    return figure


def _draw_differences(axes: Any, panels: Sequence[Quantity], rtols: Sequence[float]) -> None:
    """Draws relative differences; exactly equal values have no point on a logarithmic axis."""
    shown = [[value if 0 < value < math.inf else math.nan for value in panel.differences] for panel in panels]
    for number, (panel, values) in enumerate(zip(panels, shown, strict=True), start=2):
        label = f"{panel.name}: 0 in every step" if panel.worst == 0 else panel.name
        axes.plot(panel.steps, values, ".-", color=curve_colour(number), linewidth=0.8, markersize=4, label=label)
    for rtol in sorted({rtol for rtol in rtols if rtol > 0}):
        axes.axhline(rtol, color="red", linestyle="--", linewidth=1, label=f"tolerance {rtol:.0e}")
    is_log = max(rtols) > 0 or any(not math.isnan(value) for values in shown for value in values)
    finish_axes(axes, "relative difference", is_log=is_log)
    axes.legend()
    axes.set_xlabel("step")


@dataclass(frozen=True)
class ComparedRun:
    """One of several runs, and its comparison with the first."""

    label: str
    """Distinct name of the folder, and `run.name` if it has one."""
    notes: str
    records: tuple[StepRecord, ...]
    comparison: Comparison | None
    """Comparison with the first run; None for the first one itself."""
    page: str
    """File name of the comparison's page."""

    @property
    def verdict(self) -> str:
        if self.comparison is None:
            return "reference"
        divergence = self.comparison.divergence
        return "equal" if divergence is None else f"divergent from step {divergence.step}, {divergence.name}"

    @property
    def is_equal(self) -> bool:
        return self.comparison is None or self.comparison.divergence is None

    @property
    def last(self) -> StepRecord:
        return self.records[-1]


def report_several(runs: Sequence[Path], rtol: float | None, output: Path) -> bool:
    """Compares each run with the first, prints a table and writes the pages; returns whether all are equal."""
    compared = compare_several(runs, rtol)
    with disk_faults(f"write the comparison to {output}"):
        output.mkdir(parents=True, exist_ok=True)
        for run in compared:
            if run.comparison is not None:
                write_atomically(output / run.page, comparison_page(run.comparison))
        write_atomically(output / PAGE, page_of_several(compared))
    rows = []
    for run in compared:
        last = run.last
        numbers = (f"{last.step:,}", f"{last.loss:.6g}", f"{last.tokens_per_second:,.0f}")
        rows.append((escape(run.label), *numbers, escape(run.verdict), escape(run.notes)))
    headings = ("run", "steps", "last loss", "tokens/s", "against the first", "notes")
    console = output_console()
    _print_table(console, headings, rows, texts=("run", "against the first", "notes"))
    console.print(output / PAGE, markup=False, soft_wrap=True)
    return all(run.is_equal for run in compared)


def compare_several(runs: Sequence[Path], rtol: float | None) -> list[ComparedRun]:
    compared = []
    for number, (run, name) in enumerate(zip(runs, distinct_names(runs), strict=True)):
        text = RunFolder(run).saved_config()
        keys = {} if text is None else flat_keys(text)
        label = f"{name} ({keys['run.name']})" if keys.get("run.name") else name
        comparison = None if number == 0 else compare_runs(runs[0], run, rtol)
        records = tuple(load_curves(run).steps)
        compared.append(ComparedRun(label, keys.get("run.notes") or "", records, comparison, f"compare-{number}.html"))
    return compared


def page_of_several(runs: Sequence[ComparedRun]) -> str:
    """Makes the page: verdicts, then the curves of all runs."""
    count, num_equal = len(runs) - 1, sum(run.is_equal for run in runs) - 1
    are = "is" if num_equal == 1 else "are"
    figures = []
    for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr")):
        figures.append((name, [("by step", value_chart(f"{name} by step", _curves(runs, key), ()))]))
    return render(
        "several.html",
        runs=runs,
        is_equal=num_equal == count,
        headline=f"{num_equal} of {counted(count, 'run')} {are} the run of {runs[0].label}.",
        curves=_curves(runs, "loss"),
        figures=figures,
    )


def _curves(runs: Sequence[ComparedRun], key: str) -> list[Curve]:
    curves = []
    for slot, run in enumerate(runs):
        values = [(record.step, getattr(record, key)) for record in run.records if not record.empty]
        points = tuple((step, value) for step, value in values if math.isfinite(value))
        curves.append(Curve(f"run{slot}", run.label, slot, points))
    return curves
