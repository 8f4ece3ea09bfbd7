"""The report of a check as one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mtrain.base.files import disk_faults, write_atomically
from mtrain.verify.core.result import Deviation, Diagnosis, LayoutResult, Report, StepValues, Tolerance
from mtrain.verify.drawing.chart import Curve, difference_chart, value_chart
from mtrain.verify.drawing.document import (
    axis_name,
    document,
    facts,
    figure,
    figures,
    folded,
    legend,
    paragraph,
    preformatted,
    scrolling,
    section,
    table,
    verdict_header,
    yaml_like,
)
from mtrain.verify.drawing.heat_map import Cell, heat_legend, heat_map
from mtrain.verify.drawing.markup import Markup, element, joined
from mtrain.verify.wording import TITLES

_NOTHING = element("td", {}, "none")


def write_page(report: Report, path: Path) -> None:
    """Writes the report's page, in one move.

    Raises:
        MachineError: the file cannot be written.
    """
    with disk_faults(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, report_page(report))


def report_page(report: Report) -> str:
    """The page's text: verdict, diagnosis, layouts, curves, tensors, tolerances, configuration, in this order."""
    verdict = "PASS" if report.passed else "FAIL"
    parts = [_header(report, verdict)]
    if report.diagnosis is not None:
        parts.append(_diagnosis(report.diagnosis))
    parts += [_layouts(report), _curves(report)]
    parts += [_tensors(report)] if report.wording.maps else []
    parts += [_tolerances(report), _circumstances(report)]
    return document(f"{verdict}: {report.wording.verb} of {len(report.layouts)} {report.wording.noun}s", *parts)


def _header(report: Report, verdict: str) -> Markup:
    num_layouts, num_failed = len(report.layouts), sum(not layout.passed for layout in report.layouts)
    if report.passed:
        headline = report.wording.headline.format(count=num_layouts)
    else:
        headline = report.wording.failed_headline.format(failed=num_failed, count=num_layouts)
    length = report.wording.length.format(steps=report.num_steps)
    notes = [f"{length} Data: {report.data}. {report.created}"]
    if report.injected is not None:
        notes.append(f"A known fault was planted on purpose: {report.injected}.")
    return verdict_header(verdict, headline, is_good=report.passed, notes=notes)


def _diagnosis(diagnosis: Diagnosis) -> Markup:
    found = {
        "axis that fails": diagnosis.axis,
        "smallest layout": diagnosis.layout,
        "first step": None if diagnosis.step is None else str(diagnosis.step),
        "first quantity": diagnosis.kind and f"{TITLES[diagnosis.kind]}: {diagnosis.name}",
        "deviation": _against_tolerance(diagnosis),
        "first module": diagnosis.module,
    }
    lines = preformatted("\n".join(diagnosis.lines))
    known = {name: value for name, value in found.items() if value is not None}
    return section("Where it breaks", paragraph("For a bug report:"), lines, facts(known))


def _against_tolerance(diagnosis: Diagnosis) -> str | None:
    if diagnosis.value is None or diagnosis.tolerance is None:
        return None
    return f"{diagnosis.value:.2e}, where {diagnosis.tolerance:.2e} is tolerated"


def _layouts(report: Report) -> Markup:
    wording = report.wording
    headings = [_heading(report, name, kinds) for name, kinds in wording.columns.items()]
    columns = [wording.noun, "verdict", *headings, "worst tensor", "time"]
    rows = [_layout_row(layout, wording.columns) for layout in report.layouts]
    stops = [part for layout in report.layouts for part in _stops(layout)]
    overview = table(f"Every {wording.noun} against the reference", columns, rows, "layouts")
    return section(f"{wording.noun.capitalize()}s", paragraph(wording.compared), overview, *stops)


def _heading(report: Report, name: str, kinds: Sequence[str]) -> Markup:
    tolerance = _tolerance(report, kinds[0]) if report.wording.shows_tolerances else None
    small = [] if tolerance is None else [element("small", {}, f"tolerance {_short(tolerance.value)}")]
    return joined([TITLES.get(name, name), *small])


def _layout_row(layout: LayoutResult, columns: Mapping[str, tuple[str, ...]]) -> list[str]:
    tensor = layout.worst_tensor()
    told = [] if tensor is None else [element("code", {}, tensor.name), _details(tensor)]
    ranks = "1 rank" if layout.num_ranks == 1 else f"{layout.num_ranks} ranks"
    return [
        joined([layout.name, element("small", {}, ranks)]),
        element("td", {"class": "pass" if layout.passed else "fail"}, "✓ pass" if layout.passed else "✗ FAIL"),
        *(_worst_cell(layout.worst(*kinds)) for kinds in columns.values()),
        element("td", {"class": "words"}, *told) if told else _NOTHING,
        element("td", {"class": "number"}, f"{layout.seconds:.1f} s"),
    ]


def _worst_cell(worst: Deviation | None) -> Markup:
    if worst is None:
        return _NOTHING
    kind = "number" if worst.passed else "number fail"
    sign = "" if worst.passed else "✗ "
    when = element("small", {}, "" if worst.value == 0 else f"step {worst.step}")
    return element("td", {"class": kind}, f"{sign}{_short(worst.value)}", when)


def _details(tensor: Deviation) -> Markup:
    return element("small", {}, f"{TITLES[tensor.kind]}, step {tensor.step}")


def _stops(layout: LayoutResult) -> Iterator[Markup]:
    """What a layout's own checks said, and why it did not come to its end."""
    said = [*layout.guards, *([] if layout.error is None else [layout.error])]
    if said:
        yield element("h3", {}, f"{layout.name}: stopped by {'its own checks' if layout.guards else 'an error'}")
        yield preformatted("\n".join(said))


def _curves(report: Report) -> Markup:
    entries = [(str(slot), layout.name, slot) for slot, layout in enumerate(report.layouts)]
    drawn = [drawing for kind, name in _plotted(report) for drawing in _curve_figure(report, kind, name)]
    return section("Curves", paragraph(report.wording.curves), legend(entries), figures(*drawn))


def _plotted(report: Report) -> list[tuple[str, str]]:
    """(kind, name) of every quantity that is one number a step."""
    terms = dict.fromkeys(
        term for run in (report.reference, *report.layouts) for step in run.steps for term in step.denominators
    )
    by_term = [(kind, term) for kind in ("loss", "denominator") for term in terms]
    return [*by_term[: len(terms)], ("grad_norm", "grad_norm"), *by_term[len(terms) :]]


def _curve_figure(report: Report, kind: str, name: str) -> Iterator[Markup]:
    title = TITLES[kind] if kind == "grad_norm" else f"{TITLES[kind]} of {name}"
    values, differences = [], []
    for slot, layout in enumerate(report.layouts):
        found = sorted((each.step, each.value) for each in layout.deviations if (each.kind, each.name) == (kind, name))
        stands_out = any(not each.passed for each in layout.deviations if (each.kind, each.name) == (kind, name))
        values.append(Curve(str(slot), slot, _values(layout.steps, kind, name), not layout.passed))
        differences.append(Curve(str(slot), slot, tuple(found), stands_out))
    backdrop = _values(report.reference.steps, kind, name)
    unit = {"loss": "nats", "denominator": "sum of shares"}.get(kind, "L2, before clipping")
    pictures = []
    if backdrop or any(curve.points for curve in values):
        pictures += [
            axis_name(f"{unit}, by step"),
            value_chart(f"{title} of every {report.wording.noun} by step", values, backdrop),
        ]
    if any(curve.points for curve in differences):
        pictures += _deviation_pictures(report, kind, title, differences)
    if pictures:
        yield figure(title, *pictures)


def _deviation_pictures(report: Report, kind: str, title: str, curves: Sequence[Curve]) -> list[Markup]:
    if all(value == 0 for curve in curves for _, value in curve.points):
        return [axis_name(f"relative deviation: exactly 0 in every step of every {report.wording.noun}")]
    tolerance = _tolerance(report, kind)
    limit = None if tolerance is None else tolerance.value
    words = f"relative deviation of the {title} by step, logarithmic: {_in_words(report, curves)}"
    tolerated = "" if limit is None else f"; tolerance {_short(limit)}"
    return [axis_name(f"relative deviation, by step{tolerated}"), difference_chart(words, curves, limit)]


def _values(steps: Sequence[StepValues], kind: str, name: str) -> tuple[tuple[int, float], ...]:
    match kind:
        case "loss":
            return tuple((step.step, step.means[name]) for step in steps if name in step.means)
        case "denominator":
            return tuple((step.step, step.denominators[name]) for step in steps if name in step.denominators)
        case _:
            return tuple((step.step, step.grad_norm) for step in steps)


def _in_words(report: Report, differences: Sequence[Curve]) -> str:
    failed = [report.layouts[curve.slot].name for curve in differences if curve.stands_out]
    worst = max((value if not math.isnan(value) else math.inf) for curve in differences for _, value in curve.points)
    verdict = (
        f"all {report.wording.noun}s within the tolerance"
        if not failed
        else f"beyond the tolerance: {', '.join(failed)}"
    )
    return f"{verdict}, worst {_short(worst)}"


def _tensors(report: Report) -> Markup:
    drawings = [_tensor_map(report, kind) for kind in report.wording.maps]
    return section(
        "Tensors", paragraph(report.wording.tensors), heat_legend(), figures(*drawings), _tensor_numbers(report)
    )


def _tensor_map(report: Report, kind: str) -> Markup:
    columns = [layout.name for layout in report.layouts]
    cells: dict[tuple[str, str], Cell] = {}
    for layout in report.layouts:
        for each in _worst_by_tensor(layout, kind).values():
            words = (
                f"{each.name}\n{layout.name}\nworst at step {each.step}: {_short(each.value)}, tolerance "
                f"{_short(each.tolerance)}"
            )
            cells[each.name, layout.name] = Cell(each.excess, words)
    num_failed = sum(not cell.excess <= 1 for cell in cells.values())
    name = (
        f"worst deviation of the {TITLES[kind]}, {len(report.tensors)} tensors by {len(columns)} {report.wording.noun}s"
    )
    told = f"{name}: {num_failed} of {len(cells)} beyond the tolerance"
    picture = heat_map(told, report.tensors, columns, cells)
    return figure(
        f"{TITLES[kind].capitalize()}: {num_failed} of {len(cells)} beyond the tolerance", scrolling(name, picture)
    )


def _worst_by_tensor(layout: LayoutResult, kind: str) -> dict[str, Deviation]:
    worst: dict[str, Deviation] = {}
    for each in layout.deviations:
        if each.kind == kind and (each.name not in worst or _badness(each) > _badness(worst[each.name])):
            worst[each.name] = each
    return worst


def _badness(deviation: Deviation) -> tuple[float, float]:
    return deviation.excess, math.inf if math.isnan(deviation.value) else deviation.value


def _tensor_numbers(report: Report) -> Markup:
    """The same as a table: the worst layout of each tensor."""
    rows = []
    found = {
        kind: [(layout.name, _worst_by_tensor(layout, kind)) for layout in report.layouts]
        for kind in report.wording.maps
    }
    for tensor in report.tensors:
        cells = []
        for by_layout in found.values():
            worst = max(
                ((each[tensor], name) for name, each in by_layout if tensor in each),
                key=lambda pair: _badness(pair[0]),
                default=None,
            )
            cells.append(_NOTHING if worst is None else _tensor_cell(*worst))
        rows.append([tensor, *cells])
    columns = ["tensor", *(TITLES[kind] for kind in found)]
    return folded(
        f"The numbers: the worst {report.wording.noun} of every tensor",
        table(f"Worst {report.wording.noun} of every tensor", columns, rows),
    )


def _tensor_cell(worst: Deviation, layout: str) -> Markup:
    sign, kind = ("", "number") if worst.passed else ("✗ ", "number fail")
    return element("td", {"class": kind}, f"{sign}{_short(worst.value)}", element("small", {}, layout))


def _tolerances(report: Report) -> Markup:
    words = (
        "A layout adds the same numbers in another order, so its results differ from the exact ones by rounding. Each "
        "tolerance bounds that rounding from the precision and from how many numbers are added; none is tuned. What "
        "exceeds it is a fault."
    )
    rows = [
        [
            TITLES[each.kind],
            element("td", {"class": "number"}, _short(each.value)),
            element("td", {"class": "words"}, each.meaning),
            element("td", {}, element("code", {}, each.formula)),
            element(
                "td", {"class": "number"}, ", ".join(f"{name} = {value:.4g}" for name, value in each.inputs.items())
            ),
        ]
        for each in report.tolerances
    ]
    columns = ["quantity", "tolerance", "what it means", "formula", "with"]
    return section("Tolerances", paragraph(words), table("Where the tolerances come from", columns, rows))


def _circumstances(report: Report) -> Markup:
    changes = [element("li", {}, element("code", {}, change)) for change in report.changes]
    shrunk = [element("h3", {}, "Changed to make it small"), element("ul", {}, *changes)] if changes else []
    return section(
        "What was run",
        preformatted(report.command),
        facts({**report.environment, "data": report.data}),
        *shrunk,
        folded("The configuration that ran", preformatted(yaml_like(report.config))),
        paragraph(f"Every number of this page stands in {report.wording.json_name} beside it."),
    )


def _tolerance(report: Report, kind: str) -> Tolerance | None:
    return next((each for each in report.tolerances if each.kind == kind), None)


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
