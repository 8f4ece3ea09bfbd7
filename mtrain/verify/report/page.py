"""Report of a check as a self-contained HTML file."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from mtrain.base.yaml_text import yaml_text
from mtrain.report.pages.charts import Curve, difference_chart, value_chart
from mtrain.report.pages.html import moment, render, short
from mtrain.verify.core.result import Deviation, Diagnosis, LayoutResult, ParityReport, Report, StepValues, badness
from mtrain.verify.report.text import TITLES, Count

_UNITS = {"loss": "nats", "denominator": "sum of shares", "grad_norm": "L2, before clipping"}


class Bin(NamedTuple):
    """Colour of a heat map."""

    edge: float
    """Largest deviation with this colour, in tolerances; squares above 1 also have a cross, readable without colour."""
    kind: str
    label: str


BINS = (
    Bin(0.0, "b0", "0"),
    Bin(1e-4, "b1", "≤ 1e-4"),
    Bin(1e-3, "b2", "≤ 1e-3"),
    Bin(1e-2, "b3", "≤ 1e-2"),
    Bin(1e-1, "b4", "≤ 1e-1"),
    Bin(1.0, "b5", "≤ 1"),
    Bin(1e1, "b6", "≤ 10"),
    Bin(1e3, "b7", "≤ 1e3"),
    Bin(math.inf, "b8", "> 1e3, ∞ or nan"),
)


class Square(NamedTuple):
    """The worst step of one tensor in one layout."""

    layout: str
    worst: Deviation

    @property
    def kind(self) -> str:
        """CSS class."""
        return next((colour.kind for colour in BINS if self.worst.excess <= colour.edge), BINS[-1].kind)


class TensorMap(NamedTuple):
    """Heat map: worst deviations of one kind by tensor and layout."""

    title: str
    rows: Mapping[str, Sequence[Square | None]]
    """Squares of each tensor by layout; None if not compared."""

    @property
    def summary(self) -> str:
        """Counts the failing squares in words."""
        squares = [square for row in self.rows.values() for square in row if square is not None]
        return f"{sum(not square.worst.passed for square in squares)} of {len(squares)} beyond the tolerance"

    def worst(self, tensor: str) -> Square | None:
        """Returns the square of the tensor's worst layout; None if not compared."""
        squares = [square for square in self.rows[tensor] if square is not None]
        return max(squares, key=lambda square: badness(square.worst), default=None)


def report_page(report: Report) -> str:
    """Returns the page, from verdict and diagnosis to tolerances and configuration."""
    return render(
        "report.html",
        report=report,
        titles=TITLES,
        headline=_headline(report),
        notes=_notes(report),
        diagnosis=None if report.diagnosis is None else _facts(report.diagnosis),
        headings=[_heading(report, name, kinds) for name, kinds in report.columns.items()],
        curves=[_curve(report, slot, ()) for slot in range(len(report.layouts))],
        figures=[_figure(report, kind, name) for kind, name in _plotted(report)] if report.text.curves else [],
        bins=BINS,
        maps=[_tensor_map(report, kind) for kind in report.text.maps],
        configuration=yaml_text(report.config),
    )


def _headline(report: Report) -> str:
    return f"{report.unfinished if report.verdict == 'UNFINISHED' else report.in_words(report.text.headline)}."


def _notes(report: Report) -> list[str]:
    notes = [
        f"{report.text.length.format(steps=Count(report.num_steps))} Data: {report.data}. {moment(report.created)}"
    ]
    if isinstance(report, ParityReport):
        notes.append(report.judged)
    if report.injected is not None:
        notes.append(f"A known fault was planted on purpose: {report.injected}.")
    return notes


def _facts(diagnosis: Diagnosis) -> dict[str, str | None]:
    deviation = None
    if diagnosis.value is not None and diagnosis.tolerance is not None:
        deviation = f"{diagnosis.value:.2e} (tolerance {diagnosis.tolerance:.2e})"
    return {
        "axis that fails": diagnosis.axis,
        "smallest layout": diagnosis.layout,
        "first step": None if diagnosis.step is None else str(diagnosis.step),
        "first quantity": None if diagnosis.kind is None else f"{TITLES[diagnosis.kind]}: {diagnosis.name}",
        "deviation": deviation,
        "first module": diagnosis.module,
    }


def _heading(report: Report, name: str, kinds: Sequence[str]) -> str:
    tolerance = _tolerance(report, kinds[0]) if report.text.shows_tolerances else None
    title = TITLES.get(name, name)
    words = Markup('{}<small>tolerance <span class="whole">{}</span></small>')  # 5.7e-14 would break at its minus
    return title if tolerance is None else words.format(title, short(tolerance))


def _tolerance(report: Report, kind: str) -> float | None:
    return next((tolerance.value for tolerance in report.tolerances if tolerance.kind == kind), None)


def _plotted(report: Report) -> list[tuple[str, str]]:
    """Returns (kind, name) of every scalar quantity."""
    runs = (report.reference, *report.layouts)
    terms = list(dict.fromkeys(term for run in runs for step in run.steps for term in step.denominators))
    losses, denominators = ([(kind, term) for term in terms] for kind in ("loss", "denominator"))
    return [*losses, ("grad_norm", "grad_norm"), *denominators]


def _figure(report: Report, kind: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the caption, and (axis label, chart) of each picture; a chart may be empty."""
    title = TITLES[kind] if kind == "grad_norm" else f"{TITLES[kind]} of {name}"
    values, differences = [], []
    for slot, layout in enumerate(report.layouts):
        deviations = [deviation for deviation in layout.deviations if (deviation.kind, deviation.name) == (kind, name)]
        values.append(_curve(report, slot, _values(layout.steps, kind, name), not layout.passed))
        points = sorted((deviation.step, deviation.value) for deviation in deviations)
        differences.append(_curve(report, slot, points, any(not deviation.passed for deviation in deviations)))
    backdrop = _values(report.reference.steps, kind, name)
    pictures: list[tuple[str, str]] = []
    if backdrop or any(curve.points for curve in values):
        words = f"{title} of every {report.text.noun} by step"
        pictures.append((f"{_UNITS[kind]}, by step", value_chart(words, values, backdrop)))
    if any(curve.points for curve in differences):
        pictures.append(_difference_picture(report, kind, title, differences))
    return title, pictures


def _difference_picture(report: Report, kind: str, title: str, curves: Sequence[Curve]) -> tuple[str, str]:
    noun = report.text.noun
    if all(value == 0 for curve in curves for _, value in curve.points):
        return f"relative deviation: exactly 0 in every step of every {noun}", ""
    tolerance = _tolerance(report, kind)
    failed = [curve.label for curve in curves if curve.stands_out]
    verdict = f"beyond the tolerance: {', '.join(failed)}" if failed else f"all {noun}s within the tolerance"
    worst = max((value if not math.isnan(value) else math.inf) for curve in curves for _, value in curve.points)
    words = f"relative deviation of the {title} by step, logarithmic: {verdict}, worst {short(worst)}"
    tolerated = "" if tolerance is None else f"; tolerance {short(tolerance)}"
    return f"relative deviation, by step{tolerated}", difference_chart(words, curves, tolerance)


def _curve(report: Report, slot: int, points: Sequence[tuple[int, float]], stands_out: bool = False) -> Curve:
    return Curve(str(slot), report.layouts[slot].name, slot, tuple(points), stands_out)


def _values(steps: Sequence[StepValues], kind: str, name: str) -> list[tuple[int, float]]:
    if kind == "grad_norm":
        return [(step.step, step.grad_norm) for step in steps]
    by_term = [(step.step, step.means if kind == "loss" else step.denominators) for step in steps]
    return [(number, values[name]) for number, values in by_term if name in values]


def _tensor_map(report: Report, kind: str) -> TensorMap:
    by_layout = {layout.name: _worst_by_tensor(layout, kind) for layout in report.layouts}
    rows = {
        tensor: [Square(name, worst[tensor]) if tensor in worst else None for name, worst in by_layout.items()]
        for tensor in report.tensors
    }
    return TensorMap(TITLES[kind], rows)


def _worst_by_tensor(layout: LayoutResult, kind: str) -> dict[str, Deviation]:
    worst: dict[str, Deviation] = {}
    for deviation in layout.deviations:
        if deviation.kind == kind and (
            deviation.name not in worst or badness(deviation) > badness(worst[deviation.name])
        ):
            worst[deviation.name] = deviation
    return worst
