"""The comparison of two runs as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.runs.folder import Change
from mtrain.verify.compare_runs import Comparison, Quantity
from mtrain.verify.drawing.chart import Curve, difference_chart, value_chart
from mtrain.verify.drawing.document import (
    axis_name,
    document,
    figure,
    figures,
    legend,
    paragraph,
    section,
    table,
    verdict_header,
)
from mtrain.verify.drawing.markup import Markup, element


def comparison_page(comparison: Comparison) -> str:
    """The page's text: verdict, quantities, curves, configuration, environment, in this order."""
    verdict = "EQUAL" if comparison.divergence is None else "DIVERGENT"
    name_a, name_b = comparison.names
    return document(
        f"{verdict}: {name_a} and {name_b}",
        _header(comparison, verdict),
        _quantities(comparison.quantities),
        _curves(comparison),
        _configuration(comparison),
        _environment(comparison),
    )


def _header(comparison: Comparison, verdict: str) -> Markup:
    name_a, name_b = comparison.names
    divergence, steps = comparison.divergence, comparison.steps
    headline = f"{name_a} and {name_b} over {len(steps)} steps, {steps[0]} to {steps[-1]}."
    notes = [] if divergence is None else [f"First at {divergence}."]
    if comparison.expected is not None:
        notes.append(f"A difference is expected: {comparison.expected}.")
    notes.append(f"Tolerance: {comparison.allowed}, {comparison.allowed.reason}.")
    notes.append(f"{name_a} has recorded {comparison.num_steps[0]} steps, {name_b} {comparison.num_steps[1]}.")
    notes += [f"Tokens of {name}: {tokens}." for name, tokens in zip(comparison.names, comparison.tokens, strict=True)]
    return verdict_header(verdict, headline, is_good=divergence is None, notes=notes)


def _quantities(quantities: Sequence[Quantity]) -> Markup:
    words = (
        "Relative differences, |A - B| / max(|A|, |B|). Denominators are counts or sums of float64 and must agree; the "
        "rest may differ by the tolerance. Quantities stand in the order in which a step computes them."
    )
    rows = [[quantity.name, *_cells(quantity)] for quantity in quantities]
    columns = ["quantity", "verdict", "worst difference", "tolerance", "first step not bit-equal", "first step beyond"]
    return section("Quantities", paragraph(words), table("Every quantity of both runs", columns, rows))


def _cells(quantity: Quantity) -> list[Markup]:
    beyond = quantity.first_step_beyond(quantity.rtol)
    verdict = ("pass", "✓ equal") if beyond is None else ("fail", "✗ DIVERGENT")
    values = (
        f"{quantity.worst:.1e}",
        f"{quantity.rtol:.0e}",
        str(quantity.first_step_beyond(0.0) or "none"),
        str(beyond or "none"),
    )
    numbers = [element("td", {"class": "number"}, value) for value in values]
    return [element("td", {"class": verdict[0]}, verdict[1]), *numbers]


def _curves(comparison: Comparison) -> Markup:
    name_a, name_b = comparison.names
    words = "Above: both runs, in turns where they are equal. Below: the relative difference."
    entries = [("a", f"A: {name_a}", 0), ("b", f"B: {name_b}", 1)]
    drawn = [_figure(quantity) for quantity in comparison.quantities]
    return section("Curves", paragraph(words), legend(entries), figures(*drawn))


def _figure(quantity: Quantity) -> Markup:
    both = [
        Curve(key, slot, tuple(zip(quantity.steps, values, strict=True)))
        for slot, (key, values) in enumerate((("a", quantity.a), ("b", quantity.b)))
    ]
    parts = [axis_name("by step"), value_chart(f"{quantity.name} of both runs by step", both, ())]
    if quantity.worst == 0:
        return figure(quantity.name, *parts, axis_name("difference: exactly 0 in every step"))
    words = f"relative difference of the {quantity.name} by step, logarithmic, at most {quantity.worst:.1e}"
    differences = [Curve("difference", 2, tuple(zip(quantity.steps, quantity.differences, strict=True)))]
    chart = difference_chart(words, differences, quantity.rtol)
    return figure(quantity.name, *parts, axis_name("relative difference, by step"), chart)


def _configuration(comparison: Comparison) -> Markup:
    differing = [change for change in comparison.changes if not change.is_neutral]
    neutral = [change for change in comparison.changes if change.is_neutral]
    return section(
        "Configuration",
        _changes("Keys that make it another run", differing, comparison.names),
        _changes("Keys that leave the run the same: layout, length, what it reports", neutral, comparison.names),
    )


def _environment(comparison: Comparison) -> Markup:
    if comparison.unrecorded:
        return section("Environment", paragraph(f"Not recorded by {' and '.join(comparison.unrecorded)}."))
    changes = _changes("What the latest start of each run ran on", comparison.environment, comparison.names)
    return section("Environment", changes)


def _changes(caption: str, changes: Sequence[Change], names: tuple[str, str]) -> Markup:
    if not changes:
        return paragraph(f"{caption}: no difference.")
    rows = [[element("code", {}, change.key), change.old or "missing", change.new or "missing"] for change in changes]
    return table(caption, ["key", f"A: {names[0]}", f"B: {names[1]}"], rows, "changes")
