"""Curves over steps as SVG inside a page: equal curves stay visible, and the page's style sheet sets the colours.

matplotlib draws them in placeholder colours, which become variables of the style sheet, so one picture serves light and
dark screens. The page's script finds a curve by its key.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.style
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from mtrain.report.metrics.shown import SATURATION, curve_hue

WIDTH, VALUE_HEIGHT, DIFFERENCE_HEIGHT = 400, 200, 150
"""Sizes of charts in pixels, like all lengths in this file: at 72 dots per inch, matplotlib's points are pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 16, 24
_DASH = 6
"""Length of a curve's dash on a shared line."""
_MAX_MARKED_POINTS = 24
_MAX_TICKS = 6
_MARKERS = "osD^v"
_INK, _GRID, _PAPER, _LIMIT = _NAMED = ("#000001", "#000002", "#000003", "#000004")
_CSS = dict(zip(_NAMED, ("var(--soft)", "var(--rule)", "var(--paper)", "var(--bad)")))
_STYLE = {
    "axes.formatter.offset_threshold": 7,  # labels are written out if they have room
    "figure.dpi": 72,
    "font.family": "DejaVu Sans Mono",  # widths of the style sheet's monospace fonts
    "font.size": 11,
    "lines.scale_dashes": False,
    "path.simplify_threshold": 1.0,  # a long curve keeps its extremes to a pixel, in a few hundred points
    "svg.fonttype": "none",  # text stays text: selectable, and in the reader's own font
    "xtick.bottom": False,
    "ytick.left": False,
}
_STYLED = matplotlib.style.context(["default", _STYLE])
"""Decorator of drawing functions; makes pictures independent of the user's matplotlibrc."""


@dataclass(frozen=True)
class Curve:
    """Quantity of one run over steps."""

    key: str
    """Key of the legend entry that highlights the curve."""
    label: str
    """Text shown under the pointer."""
    slot: int
    """Number of the curve on the page; determines colour, marker and its turn in a shared line."""
    points: tuple[tuple[int, float], ...]
    stands_out: bool = False
    """Whether the curve is drawn on top and with filled markers; it shares its line only with curves of its kind."""


class _Thousands(ScalarFormatter):
    """Labels of an axis, with commas from four digits on: 4,096."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        label: str = super().__call__(x, pos)
        digits = label.partition(".")[0]
        return f"{int(digits):,}{label.removeprefix(digits)}" if re.fullmatch(r"\d{4,}", digits) else label


@functools.cache
@_STYLED
def swatch(slot: int) -> Markup:
    """Draws the line and marker of a curve for a legend."""
    figure = Figure((24 / 72, 12 / 72), frameon=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-1, 1)
    axes.plot([-1, 0, 1], [0, 0, 0], markevery=[1], linewidth=3.2, clip_on=False, **_look(slot))
    return _svg(figure, {"class": "swatch", "aria-hidden": "true"}, salt=f"swatch {slot}")


@_STYLED
def value_chart(name: str, curves: Sequence[Curve], backdrop: Sequence[tuple[int, float]]) -> Markup:
    """Draws curves of one quantity; equal curves alternate in a dashed line.

    Args:
        curves: Curves, at least one, with at least one point in total.
        backdrop: Points of the reference, drawn as a broad band in the background; may be empty.
    """
    points = [*itertools.chain.from_iterable(curve.points for curve in curves), *backdrop]
    figure, axes = _panel(VALUE_HEIGHT, [step for step, _ in points], padding=0.04)
    axes.set_ylim(*_span([value for _, value in points]))
    if backdrop:
        wide = {"linewidth": 11, "alpha": 0.22, "solid_capstyle": "round"}
        axes.plot(*_lines(backdrop), color=_INK, gid="backdrop", clip_on=False, **wide)
    below, above = ([curve for curve in curves if curve.stands_out == is_above] for is_above in (False, True))
    _draw_shared_line(axes, below, first_turn=0)
    _draw_shared_line(axes, above, first_turn=1 if below else 0)
    return _chart(figure, name, curves)


@_STYLED
def difference_chart(name: str, curves: Sequence[Curve], tolerance: float | None) -> Markup:
    """Draws relative differences, which are never negative, on a logarithmic axis; equal ones side by side.

    Args:
        curves: Curves, at least one, with at least one point in total.
        tolerance: Drawn as a line if it is above 0.
    """
    points = list(itertools.chain.from_iterable(curve.points for curve in curves))
    values, steps = [value for _, value in points], sorted({step for step, _ in points})
    figure, axes = _panel(DIFFERENCE_HEIGHT, steps, padding=0.09)
    decades = _Decades.around([*values, *([tolerance] if tolerance else [])])
    labels = decades.labels(values)
    axes.set_ylim(min(labels) - 0.4 * decades.room, max(*labels, decades.high) + 0.4 * decades.room)
    axes.set_yticks(list(labels), list(labels.values()))
    if tolerance:
        y, words = math.log10(tolerance), f"tolerance {tolerance:.1e}"
        axes.axhline(y, color=_LIMIT, linewidth=1.3, linestyle=(0, (5, 3)), gid="limit")
        above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(words, (1, y), xycoords=axes.get_yaxis_transform(), color=_LIMIT, **above)
    is_marked, spread = len(steps) <= _MAX_MARKED_POINTS, 0.0
    if is_marked and len(curves) > 1:  # curves of one step are drawn side by side
        gap = min((after - before for before, after in itertools.pairwise(steps)), default=1)
        spread = min(0.7 * gap, 0.16 * (steps[-1] - steps[0]) if steps[-1] > steps[0] else 0.3)
    for turn, curve in enumerate(curves):
        shift = spread * (turn / max(1, len(curves) - 1) - 0.5)
        line = _lines([(step + shift, decades.height(value)) for step, value in curve.points])
        look = _look(curve.slot, is_filled=curve.stands_out) if is_marked else {"color": _placeholder(curve.slot)}
        style = "-" if len(curves) == 1 or not is_marked else ""
        axes.plot(*line, linestyle=style, linewidth=1, gid=f"curve {curve.key}", clip_on=False, **look)
    return _chart(figure, name, curves)


@_STYLED
def history_chart(name: str, curves: Sequence[Curve], marks: Sequence[int], *, is_log: bool = False) -> Markup:
    """Draws curves of one run of any length: many steps as means of neighbours, in a band of their range.

    Args:
        curves: Curves, at least one, with at least one point in total; one that stands out has a marker at each point.
        is_log: Whether the axis of values is logarithmic; all values must then be positive.
    """
    points = list(itertools.chain.from_iterable(curve.points for curve in curves))
    figure, axes = _panel(VALUE_HEIGHT, [step for step, _ in points], padding=0.02)
    for mark in marks:
        axes.axvline(mark, color=_INK, linewidth=1, linestyle=(0, (2, 3)), gid="mark")
    for curve in curves:
        look, gid = {"color": _placeholder(curve.slot), "clip_on": False}, f"curve {curve.key}"
        bins = _bins(curve.points)
        if len(bins) < len(curve.points):
            band = [[low for _, low, _, _ in bins], [high for _, _, _, high in bins]]
            axes.fill_between([step for step, *_ in bins], *band, alpha=0.25, linewidth=0, gid=gid, **look)
        if curve.stands_out:
            look |= _look(curve.slot) | {"linestyle": (0, (3, 2)), "zorder": 3}
            look["marker"] = look["marker"] if len(bins) <= _MAX_MARKED_POINTS else ""
        axes.plot(*_lines([(step, mean) for step, _, mean, _ in bins]), linewidth=1.6, gid=gid, **look)
    if is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(*_span([value for _, value in points]))
    return _chart(figure, name, curves)


def _bins(points: Sequence[tuple[int, float]]) -> list[tuple[float, float, float, float]]:
    """Returns (step, least, mean, largest) of groups of neighbours about a pixel wide; nan if a value is not finite."""
    size = max(1, math.ceil(len(points) / (WIDTH - _LEFT - _RIGHT)))
    bins = []
    for first in range(0, len(points), size):
        steps, values = zip(*points[first : first + size])
        known = values if all(map(math.isfinite, values)) else (math.nan,)
        bins.append((sum(steps) / len(steps), min(known), sum(known) / len(known), max(known)))
    return bins


@dataclass(frozen=True)
class _Decades:
    """Axis of whole powers of ten, with room below for 0 and above for values that are not finite."""

    low: int
    high: int

    @classmethod
    def around(cls, values: Iterable[float]) -> _Decades:
        powers = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        return cls(low, max(high, low + 1))

    @property
    def room(self) -> float:
        return 0.12 * (self.high - self.low)

    def height(self, value: float) -> float:
        if not math.isfinite(value):
            return self.high + self.room
        return math.log10(value) if value > 0 else self.low - self.room

    def labels(self, values: Sequence[float]) -> dict[float, str]:
        spacing = math.ceil((self.high - self.low) / (_MAX_TICKS - 1))
        labels = {float(power): f"1e{power}" for power in range(self.low, self.high + 1, spacing)}
        labels |= {self.height(value): "0" for value in values if value == 0}
        return labels | {self.height(value): "∞, nan" for value in values if not math.isfinite(value)}


def _panel(height: int, steps: Sequence[int], padding: float) -> tuple[Figure, Any]:
    """Makes a figure with axes over whole steps; `padding` is the share of the steps that stays free on either side."""
    figure = Figure((WIDTH / 72, height / 72), frameon=False)
    size = ((WIDTH - _LEFT - _RIGHT) / WIDTH, (height - _TOP - _BOTTOM) / height)
    axes = figure.add_axes((_LEFT / WIDTH, _BOTTOM / height, *size))
    axes.patch.set_visible(False)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    axes.tick_params(labelcolor=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.yaxis.set_major_locator(MaxNLocator(_MAX_TICKS, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_Thousands())
    axes.yaxis.get_offset_text().set_color(_INK)
    low, high = min(steps), max(steps)
    free = padding * (high - low) if high > low else 1.0
    axes.set_xlim(low - free, high + free)
    # round steps at even distances, and the first step if it has room
    ticks = MaxNLocator(_MAX_TICKS, integer=True).tick_values(low, high)
    inside = [int(tick) for tick in ticks if low <= tick <= high]
    shown = inside if inside and inside[0] - low < (ticks[1] - ticks[0]) / 2 else [low, *inside]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
    return figure, axes


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Returns limits around the finite values; a spread within the rounding of float64 becomes a flat line."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    free = 0.08 * (high - low) if high - low > 1e-12 * abs(high) else abs(high) * 0.05
    free = 1.0 if free == 0 else free
    return low - free, high + free


def _draw_shared_line(axes: Any, curves: Sequence[Curve], first_turn: int) -> None:
    """Draws curves that may be equal: turn 0 as a solid line, later turns as dashes; markers alternate as well."""
    num_turns = first_turn + len(curves)
    for turn, curve in enumerate(curves):
        line, gid = _lines(curve.points), f"curve {curve.key}"
        dashes = turn + first_turn > 0
        if dashes:  # a thin line between its dashes
            axes.plot(*line, color=_placeholder(curve.slot), linewidth=1, alpha=0.5, gid=gid, clip_on=False)
        style = (-_DASH * (turn + first_turn), (_DASH, _DASH * (num_turns - 1))) if dashes else "-"
        marked = [index for index in range(len(curve.points)) if index % len(curves) == turn % len(curve.points)]
        look = {**_look(curve.slot, is_filled=curve.stands_out), "markevery": marked}
        if len(curve.points) > _MAX_MARKED_POINTS:
            look["marker"] = ""
        axes.plot(*line, linestyle=style, linewidth=3.2, gid=gid, clip_on=False, **look)


def _look(slot: int, *, is_filled: bool = False) -> dict[str, Any]:
    colour = _placeholder(slot)
    face = colour if is_filled else _PAPER
    marker = {"marker": _MARKERS[slot % len(_MARKERS)], "markersize": 6.5, "markeredgewidth": 1.5}
    return {"color": colour, "markeredgecolor": colour, "markerfacecolor": face, **marker}


def _lines(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Splits points into steps and values; nan interrupts the line."""
    return [step for step, _ in points], [value if math.isfinite(value) else math.nan for _, value in points]


def _placeholder(slot: int) -> str:
    """Returns the colour that represents a curve's colour until the picture is part of the page."""
    return f"#01{slot % 0x10000:04x}"


def _css_colour(match: re.Match[str]) -> str:
    colour = match.group()
    return _CSS.get(colour) or f"hsl({curve_hue(int(colour[3:], 16))} {SATURATION:.0%} var(--line-light))"


def _chart(figure: Figure, name: str, curves: Sequence[Curve]) -> Markup:
    """Returns the picture, with the data that the page's script shows under the pointer as JSON: axis and curves."""
    low, high = figure.axes[0].get_xlim()
    shown = []
    for curve in curves:
        bins = _bins(curve.points) if curve.points else []
        values = [float(f"{mean:.6g}") if math.isfinite(mean) else None for _, _, mean, _ in bins]
        shown.append({"label": curve.label, "steps": [round(step) for step, *_ in bins], "values": values})
    axis = {"left": _LEFT, "right": WIDTH - _RIGHT, "low": float(low), "high": float(high)}
    data = json.dumps({**axis, "curves": shown}, separators=(",", ":"))
    attributes = {"class": "chart", "role": "img", "aria-label": name, "data-values": data}
    return _svg(figure, attributes, name, {curve.key: curve.label for curve in curves})


def _svg(figure: Figure, attributes: Mapping[str, str], salt: str, labels: Mapping[str, str] = {}) -> Markup:
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(text.getvalue())
    root.remove(root[0])  # a style sheet, which in HTML would apply to the whole page
    root.attrib = {**attributes, "viewBox": root.attrib["viewBox"]}
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # HTML knows the elements of SVG without their namespace
        if (target := element.attrib.pop("{http://www.w3.org/1999/xlink}href", None)) is not None:
            element.set("xlink:href", target)
        if (style := element.attrib.get("style")) is not None:
            element.set("style", re.sub("#0[01][0-9a-f]{4}", _css_colour, style))
        if element.tag == "g":
            kind, _, key = element.attrib.pop("id", "").partition(" ")
            if kind in ("curve", "backdrop", "limit", "mark"):
                element.set("class", kind)
            if kind == "curve":
                element.set("data-curve", key)
                title = ElementTree.Element("title")
                title.text = labels[key]
                element.insert(0, title)
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False))
