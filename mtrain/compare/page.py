"""HTML page that compares two runs, as one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.compare.runs import Comparison, Quantity
from mtrain.pages.charts import Curve, difference_chart, value_chart
from mtrain.pages.html import render


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
