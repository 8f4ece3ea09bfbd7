"""A field of deviations as a picture: how many tolerances each one is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtrain.verify.drawing.markup import Attributes, Markup, element, joined

_CELL_WIDTH, _CELL_HEIGHT, _CHARACTER = 20.0, 16.0, 6.7
_SLANT = math.radians(50)
_BINS = (
    (0.0, "b0", "0"),
    (1e-4, "b1", "1e-4"),
    (1e-3, "b2", "1e-3"),
    (1e-2, "b3", "1e-2"),
    (1e-1, "b4", "1e-1"),
    (1.0, "b5", "1"),
    (1e1, "b6", "10"),
    (1e3, "b7", "1e3"),
    (math.inf, "b8", "∞"),
)
"""Upper edge in tolerances, class of the style sheet, label. Those above 1 also carry a cross: not by colour alone."""


@dataclass(frozen=True)
class Cell:
    """One deviation."""

    excess: float
    """In tolerances: above 1 it fails; nan where there is no number."""
    words: str
    """All about it, shown where a pointer rests on it."""


def heat_map(name: str, rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], Cell]) -> Markup:
    """One square for each row and column; an empty one where `cells` has none.

    The rows' names stand on the right, so that a narrow screen shows squares first.

    Args:
        name: What the picture shows, for those who do not see it.
        rows: Such as tensors, from top to bottom.
        columns: Such as layouts.
        cells: By row and column.
    """
    left, right = 4.0, 10 + _CELL_WIDTH * len(columns)
    longest_row, longest_column = (_CHARACTER * max(map(len, names), default=0) for names in (rows, columns))
    top = 12 + longest_column * math.sin(_SLANT)
    width = right + max(longest_row, longest_column * math.cos(_SLANT)) + 6
    height = top + _CELL_HEIGHT * len(rows) + 6
    parts: list[Markup] = []
    for number, column in enumerate(columns):
        x, y = left + _CELL_WIDTH * (number + 0.5), top - 6
        turned: Attributes = {"x": x, "y": y, "transform": f"rotate(-50 {x:.1f} {y:.1f})"}
        parts.append(element("text", turned, column))
    for number, row in enumerate(rows):
        y = top + _CELL_HEIGHT * number
        parts.append(element("text", {"x": right, "y": y + 12}, row))
        for place, column in enumerate(columns):
            x = left + _CELL_WIDTH * place
            parts += _square(x, y, cells.get((row, column)))
    size: Attributes = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": round(width), "height": round(height)}
    return element("svg", {**size, "class": "heat", "role": "img", "aria-label": name}, *parts)


def heat_legend() -> Markup:
    """The colours in order, with the tolerance between the last that passes and the first that fails."""
    passed = [_legend_entry(kind, f"≤ {label}" if edge else "0") for edge, kind, label in _BINS if edge <= 1]
    failed = [
        _legend_entry(kind, f"≤ {label}" if edge < math.inf else "> 1e3, ∞ or nan")
        for edge, kind, label in _BINS
        if edge > 1
    ]
    mark = element("li", {"class": "tolerance"}, "tolerance = 1")
    none = element("li", {}, _sample("none"), "not measured")
    return element("ul", {"class": "heat-legend"}, *passed, mark, *failed, none)


def _square(x: float, y: float, cell: Cell | None) -> Iterable[Markup]:
    size: Attributes = {"x": x + 1, "y": y + 1, "width": _CELL_WIDTH - 2, "height": _CELL_HEIGHT - 2}
    if cell is None:
        yield element("rect", {**size, "class": "none"})
        return
    kind = next((kind for edge, kind, _ in _BINS if cell.excess <= edge), _BINS[-1][1])
    yield element("rect", {**size, "class": kind}, element("title", {}, cell.words))
    if not cell.excess <= 1:
        yield _cross(x + _CELL_WIDTH / 2, y + _CELL_HEIGHT / 2)


def _cross(x: float, y: float) -> Markup:
    return element("path", {"class": "cross", "d": f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"})


def _legend_entry(kind: str, label: str) -> Markup:
    return element("li", {}, _sample(kind), label)


def _sample(kind: str) -> Markup:
    rect = element("rect", {"x": 1, "y": 1, "width": 18, "height": 14, "class": kind})
    inside = [rect, _cross(10, 8)] if kind in ("b6", "b7", "b8") else [rect]
    size: Attributes = {"width": 20, "height": 16, "viewBox": "0 0 20 16", "class": "heat", "aria-hidden": "true"}
    return element("svg", size, joined(inside))
