"""Output of `mtrain compare`: lines and a table on the terminal, a picture, and a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from mtrain.base.files import disk_faults, replacing, write_atomically
from mtrain.base.log import output_console
from mtrain.config.changes import Change
from mtrain.report.compare.runs import Comparison, Quantity, compare_runs
from mtrain.report.metrics.plot import draw_curve, finish_axes
from mtrain.report.metrics.shown import curve_colour
from mtrain.report.pages.charts import Curve, difference_chart, value_chart
from mtrain.report.pages.html import render


def comparison_page(comparison: Comparison) -> str:
    """Makes the page: verdict, quantities, curves, configuration, environment, in this order."""
    name_a, name_b = comparison.names
    first, last = comparison.steps[0], comparison.steps[-1]
    labels = [f"A: {name_a}", f"B: {name_b}"]
    return render(
        "comparison.html",
        comparison=comparison,
        headline=f"{name_a} and {name_b} over {len(comparison.steps)} steps, {first} to {last}.",
        notes=_notes(comparison),
        curves=_curves(labels, [(), ()]),
        figures=[(quantity.name, _pictures(quantity, labels)) for quantity in comparison.quantities],
    )


def _notes(comparison: Comparison) -> list[str]:
    name_a, name_b = comparison.names
    notes = [] if comparison.divergence is None else [f"First at {comparison.divergence}."]
    if comparison.expected is not None:
        notes.append(f"A difference is expected: {comparison.expected}.")
    notes.append(f"Tolerance: {comparison.allowed}, {comparison.allowed.reason}.")
    notes.append(f"{name_a} has recorded {comparison.num_steps[0]} steps, {name_b} {comparison.num_steps[1]}.")
    notes += [f"Changed on the way, with consent: {change}." for change in comparison.on_the_way]
    notes += [f"Tokens of {name}: {tokens}." for name, tokens in zip(comparison.names, comparison.tokens, strict=True)]
    return notes


def _pictures(quantity: Quantity, labels: Sequence[str]) -> list[tuple[str, str]]:
    """Draws the values and their difference: (caption of the axis, chart or "")."""
    points = [tuple(zip(quantity.steps, values, strict=True)) for values in (quantity.a, quantity.b)]
    values = value_chart(f"{quantity.name} of both runs by step", _curves(labels, points), ())
    if quantity.worst == 0:
        return [("by step", values), ("difference: exactly 0 in every step", "")]
    words = f"relative difference of the {quantity.name} by step, logarithmic, at most {quantity.worst:.1e}"
    found = tuple(zip(quantity.steps, quantity.differences, strict=True))
    differences = difference_chart(words, [Curve("difference", "difference", 2, found)], quantity.rtol)
    return [("by step", values), ("relative difference, by step", differences)]


def _curves(labels: Sequence[str], points: Sequence[tuple[tuple[int, float], ...]]) -> list[Curve]:
    return [Curve("ab"[slot], labels[slot], slot, points[slot]) for slot in range(2)]


def report_comparison(run_a: Path, run_b: Path, rtol: float | None, output: Path) -> bool:
    """Compares two runs, prints the result and writes `compare.html` and `compare.png`; returns whether they are
    equal."""
    comparison = compare_runs(run_a, run_b, rtol)
    page, picture = output / "compare.html", output / "compare.png"
    with disk_faults(f"write the comparison to {output}"):
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(page, comparison_page(comparison))
        with replacing(picture) as new:
            comparison_picture(comparison).savefig(new, format="png")
    print_comparison(comparison, [page, picture])
    return comparison.divergence is None


def print_comparison(comparison: Comparison, files: Sequence[Path]) -> None:
    """Prints differences, verdict and written files; plain lines without a terminal."""
    console = output_console(160)
    divergence = comparison.divergence
    verdict = f"equal within {comparison.allowed}" if divergence is None else f"divergent from {divergence}"
    for name, value in {**_facts(comparison), "verdict": verdict}.items():
        console.print(f"[bold]{name:<15}[/bold]{escape(value)}", soft_wrap=True)
    console.print(_table(comparison, plain=not console.is_terminal))
    console.print(*files, sep="\n", markup=False, soft_wrap=True)


def comparison_picture(comparison: Comparison) -> Figure:
    """Draws loss, gradient norm and denominator of both runs above their relative differences."""
    kinds = ("loss", "grad_norm", "denominator")
    panels = [next(each for each in comparison.quantities if each.kind == kind) for kind in kinds]
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


def _facts(comparison: Comparison) -> dict[str, str]:
    listing = {
        label: f"{name}, {count} steps"
        for label, name, count in zip("AB", comparison.names, comparison.num_steps, strict=True)
    }
    steps = comparison.steps
    listing["compared"] = f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    listing |= {f"tokens of {label}": tokens for label, tokens in zip("AB", comparison.tokens, strict=True)}
    listing["configuration"] = _in_one_line([change for change in comparison.changes if not change.is_neutral])
    listing["run as such"] = _in_one_line([change for change in comparison.changes if change.is_neutral])
    if comparison.on_the_way:
        listing["changed"] = "; ".join(comparison.on_the_way)
    listing["environment"] = _in_one_line(comparison.environment)
    if comparison.unrecorded:
        listing["environment"] = f"not recorded by {' and '.join(comparison.unrecorded)}"
    listing["tolerance"] = f"{comparison.allowed}, {comparison.allowed.reason}"
    if comparison.expected is not None:
        listing["expected"] = f"a difference: {comparison.expected}"
    return listing


def _in_one_line(changes: Sequence[Change]) -> str:
    if not changes:
        return "the same"
    return ", ".join(f"{change.key}: {change.old or 'missing'} -> {change.new or 'missing'}" for change in changes)


def _table(comparison: Comparison, plain: bool) -> Table:
    table = Table(pad_edge=False)
    if plain:
        table.box = None
    table.add_column("quantity")
    for heading in ("worst difference", "tolerance", "first step not bit-equal", "first step beyond tolerance"):
        table.add_column(heading, justify="right")
    for quantity in comparison.quantities:
        first, beyond = (quantity.first_step_beyond(rtol) for rtol in (0.0, quantity.rtol))
        cells = (f"{quantity.worst:.1e}", f"{quantity.rtol:.0e}", str(first or "none"), str(beyond or "none"))
        table.add_row(quantity.name, *cells)
    return table
