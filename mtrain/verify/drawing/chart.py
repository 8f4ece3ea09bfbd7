"""Curves over steps, such that equal ones stay visible, and their differences on an axis of logarithms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mtrain.verify.drawing.axis import Axis, linear_axis, log_axis, step_axis
from mtrain.verify.drawing.markup import Attributes, Markup, element, joined

WIDTH, VALUE_HEIGHT, DIFFERENCE_HEIGHT = 400.0, 200.0, 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 10.0, 24.0
_DASH = 6.0
"""Length in pixels of one curve's turn on a line that several share."""
_MAX_POINTS = 400
_MAX_MARKED_POINTS = 24
_SHAPES: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 3.5:.1f} {y:.1f}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    lambda x, y: f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
    lambda x, y: f"M{x:.1f} {y - 4.5:.1f}l4.5 4.5l-4.5 4.5l-4.5 -4.5z",
    lambda x, y: f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    lambda x, y: f"M{x:.1f} {y + 4:.1f}l4 -7h-8z",
)


@dataclass(frozen=True)
class Curve:
    """One run's quantity over steps."""

    key: str
    """Of the entry of the legend that brings it out."""
    slot: int
    """Its place among all curves of the page; gives colour, marker and turn."""
    points: tuple[tuple[int, float], ...]
    """(step, value), by step."""
    stands_out: bool = False
    """Drawn on top and with filled markers; shares its line with others of its kind only."""


def swatch(slot: int) -> Markup:
    """The colour and marker of a curve, for a legend."""
    mark = element("path", {"class": "mark", "d": _SHAPES[slot % len(_SHAPES)](12, 6)})
    line = element("path", {"class": "line", "d": "M0 6h24"})
    attributes: Attributes = {
        "width": 24,
        "height": 12,
        "viewBox": "0 0 24 12",
        "aria-hidden": "true",
        "style": _colour(slot),
    }
    return element("svg", attributes, line, mark)


def value_chart(name: str, curves: Sequence[Curve], backdrop: Sequence[tuple[int, float]]) -> Markup:
    """Curves of one quantity; where several are equal, each has its turn in a striped line.

    Args:
        name: What the picture shows, for those who do not see it.
        curves: At least one, with at least one point in all.
        backdrop: The reference, as a broad band behind the curves; may be empty.
    """
    everything = [point for curve in curves for point in curve.points] + list(backdrop)
    x_axis = step_axis([step for step, _ in everything], _LEFT + 12, WIDTH - _RIGHT - 12)
    y_axis = linear_axis((value for _, value in everything), VALUE_HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_axis, y_axis, VALUE_HEIGHT)]
    if backdrop:
        parts.append(element("path", {"class": "backdrop", "d": _path(backdrop, x_axis, y_axis)}))
    below, above = ([each for each in curves if each.stands_out == is_above] for is_above in (False, True))
    parts += _shared_lines(below, x_axis, y_axis, first_turn=0)
    parts += _shared_lines(above, x_axis, y_axis, first_turn=1 if below else 0)
    return _picture(name, VALUE_HEIGHT, parts)


def difference_chart(name: str, curves: Sequence[Curve], tolerance: float | None) -> Markup:
    """Relative differences, not negative; equal ones stand side by side.

    Args:
        name: What the picture shows, for those who do not see it.
        curves: At least one, with at least one point in all.
        tolerance: Drawn as a line where it is above 0.
    """
    points = [point for curve in curves for point in curve.points]
    steps = sorted({step for step, _ in points})
    limits = [tolerance] if tolerance is not None and tolerance > 0 else []
    x_axis = step_axis(steps, _LEFT + 24, WIDTH - _RIGHT - 24)
    y_axis = log_axis([*(value for _, value in points), *limits], DIFFERENCE_HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_axis, y_axis, DIFFERENCE_HEIGHT)]
    for limit in limits:
        y = y_axis.place(limit)
        parts.append(element("line", {"class": "limit", "x1": _LEFT, "x2": WIDTH - _RIGHT, "y1": y, "y2": y}))
        below = y < _TOP + 12
        label: Attributes = {
            "class": "limit-label",
            "x": WIDTH - _RIGHT,
            "y": y + 11 if below else y - 3,
            "text-anchor": "end",
        }
        parts.append(element("text", label, f"tolerance {limit:.1e}"))
    gap = min((x_axis.place(b) - x_axis.place(a) for a, b in itertools.pairwise(steps)), default=120.0)
    spread = min(0.7 * gap, 44.0) if len(steps) <= _MAX_MARKED_POINTS and len(curves) > 1 else 0.0
    for turn, curve in enumerate(curves):
        shifted = _shifted(x_axis, spread * (turn / max(1, len(curves) - 1) - 0.5))
        marks = _marks(curve, curve.points, shifted, y_axis)
        is_line = len(curves) == 1 or not marks
        line = element("path", {"class": "thin", "d": _path(thinned(curve.points), shifted, y_axis)})
        parts.append(_group(curve, *([line] if is_line else []), *marks))
    return _picture(name, DIFFERENCE_HEIGHT, parts)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of a long curve the extremes of each short stretch, and the first value there that is no number."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[tuple[int, float]] = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        finite = sorted((point for point in stretch if math.isfinite(point[1])), key=lambda point: point[1])
        others = [point for point in stretch if not math.isfinite(point[1])]
        kept += sorted({*finite[:1], *finite[-1:], *others[:1]}, key=lambda point: point[0])
    return kept


def _shared_lines(curves: Sequence[Curve], x_axis: Axis, y_axis: Axis, first_turn: int) -> Iterator[Markup]:
    """Curves that are likely to be equal: a whole line in turn 0, dashes in the others; markers take turns too.

    Args:
        curves: Those that share a line.
        x_axis: Of steps.
        y_axis: Of values.
        first_turn: 1 leaves a turn to what lies below.
    """
    num_turns = first_turn + len(curves)
    for turn, curve in enumerate(curves, start=first_turn):
        path = _path(thinned(curve.points), x_axis, y_axis)
        pattern = f"{_DASH:g} {_DASH * (num_turns - 1):g}"
        dashes: Attributes = {"stroke-dasharray": pattern, "stroke-dashoffset": -turn * _DASH} if turn > 0 else {}
        line = element("path", {"class": "line", "d": path, **dashes})
        under = [element("path", {"class": "under", "d": path})] if dashes else []
        yield _group(
            curve, *under, line, *_marks(curve, _own_points(curve, turn - first_turn, len(curves)), x_axis, y_axis)
        )


def _own_points(curve: Curve, turn: int, num_turns: int) -> Sequence[tuple[int, float]]:
    """The points at which this curve shows its marker; each curve has at least one."""
    points = curve.points
    if len(points) > _MAX_MARKED_POINTS:
        return ()
    return [point for index, point in enumerate(points) if index % num_turns == turn % min(num_turns, len(points))]


def _picture(name: str, height: float, parts: Iterable[Markup]) -> Markup:
    size: Attributes = {"viewBox": f"0 0 {WIDTH:.0f} {height:.0f}", "class": "chart", "role": "img", "aria-label": name}
    return element("svg", size, *parts)


def _group(curve: Curve, *parts: Markup) -> Markup:
    kind = "curve stands-out" if curve.stands_out else "curve"
    return element("g", {"class": kind, "style": _colour(curve.slot), "data-curve": curve.key}, *parts)


def _colour(slot: int) -> str:
    """Hues by the golden angle: any number of them, neighbours far apart. Lightness is the page's."""
    return f"--hue:{round(215 + 137.508 * slot) % 360}"


def _marks(curve: Curve, points: Sequence[tuple[int, float]], x_axis: Axis, y_axis: Axis) -> list[Markup]:
    """A marker for each point of a short curve."""
    if len(points) > _MAX_MARKED_POINTS:
        return []
    shape = _SHAPES[curve.slot % len(_SHAPES)]
    outline = "".join(shape(x_axis.place(step), y) for step, value in points if math.isfinite(y := y_axis.place(value)))
    return [element("path", {"class": "mark", "d": outline})] if outline else []


def _shifted(axis: Axis, pixels: float) -> Axis:
    return Axis(axis.ticks, lambda value: axis.place(value) + pixels)


def _path(points: Sequence[tuple[int, float]], x_axis: Axis, y_axis: Axis) -> str:
    """Straight lines between neighbours; interrupted where a value has no place."""
    commands, pen = [], "M"
    for step, value in points:
        y = y_axis.place(value)
        if math.isfinite(y):
            commands.append(f"{pen}{x_axis.place(step):.1f} {y:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(commands)


def _frame(x_axis: Axis, y_axis: Axis, height: float) -> Markup:
    bottom, right = height - _BOTTOM, WIDTH - _RIGHT
    parts = [element("line", {"class": "base", "x1": _LEFT, "x2": right, "y1": bottom, "y2": bottom})]
    for tick in y_axis.ticks:
        y = tick.position
        parts.append(element("line", {"class": "grid", "x1": _LEFT, "x2": right, "y1": y, "y2": y}))
        parts.append(element("text", {"x": _LEFT - 5, "y": y + 4, "text-anchor": "end"}, tick.label))
    for tick in x_axis.ticks:
        label: Attributes = {"x": tick.position, "y": bottom + 15, "text-anchor": "middle"}
        parts.append(element("text", label, tick.label))
    return joined(parts)
