"""Report of `mtrain verify rollout`: as data, on the terminal and as a page."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.spelling import counted
from mtrain.report.pages.charts import Curve, difference_chart
from mtrain.report.pages.html import moment, render, write_page
from mtrain.verify.core.result import encoded
from mtrain.verify.rollout.exact import LIMIT, Spread

FORMAT = 1
"""Version of the JSON file; raised when a field changes meaning."""
JSON_NAME, PAGE_NAME = "rollout.json", "rollout.html"


@dataclass(frozen=True)
class Side:
    """Log-probabilities of the engine or trainer, compared with exact ones."""

    name: str
    dtype: str
    spread: Spread
    allowed: Spread
    """Largest explained differences: 4 times those of the reference in this precision."""
    mean: float
    """Mean signed difference in nats; near 0 for rounding."""

    @property
    def passed(self) -> bool:
        """Says whether rounding explains the differences."""
        return self.spread.within(self.allowed)


@dataclass(frozen=True)
class Finding:
    """Cause of a disagreement, known or not."""

    cause: str
    lines: tuple[str, str]


@dataclass(frozen=True)
class RolloutReport:
    """Everything that was compared."""

    created: str
    command: str
    environment: dict[str, str]
    model: str
    """Model as the user named it, with the step of its checkpoint."""
    file: str
    num_rollouts: int
    num_tokens: int
    findings: tuple[Finding, ...]
    """Causes, most certain first; empty if all agree."""
    num_deviating: int = 0
    """Rollouts with a token that rounding does not explain."""
    sides: tuple[Side, ...] = ()
    """The rollout, then the trainer under each layout that ran; empty if an exact property is violated."""
    tried: tuple[tuple[str, Spread, bool], ...] = ()
    """Tried causes: name and fact, remaining deviation, whether it explains."""
    tokens: tuple[tuple[float, ...], ...] = ()
    """Exact log-probability, difference of the engine and difference of the trainer, by drawn token."""
    positions: tuple[tuple[float, float], ...] = ()
    """Root mean square of both differences by position in the answer."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """Largest relative difference of hidden states by module in forward order; may be empty."""
    routes: str | None = None
    """How many choices of experts equal the reference's; None if no rollout has routes."""
    replay: str | None = None
    """Distance of rollout and trainer without and with the rollout's routes; None if they were not replayed."""
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        """Says whether everything agrees."""
        return not self.findings

    def to_json(self) -> str:
        """Returns strict JSON; non-finite numbers become the texts "inf", "-inf" and "nan"."""
        return json.dumps(encoded(asdict(self)), allow_nan=False, separators=(",", ":"))


def lines_of(report: RolloutReport, folder: Path) -> Iterator[str]:
    """Yields the terminal output: a line for each side, two for each finding, and the verdict."""
    for side in report.sides:
        verdict = "agrees with float64" if side.passed else "DEVIATES from float64"
        yield (
            f"{side.name} ({side.dtype}): {verdict}: worst {side.spread.worst:.1e} nats (rounding: "
            f"{side.allowed.worst:.1e}), rms {side.spread.rms:.1e} ({side.allowed.rms:.1e}), mean {side.mean:+.1e}"
        )
    if report.routes is not None:
        yield f"routes: {report.routes}"
    if report.replay is not None:
        yield f"rollout against trainer: {report.replay}"
    for finding in report.findings:
        yield from ("", *finding.lines)
    yield ""
    compared = f"{counted(report.num_rollouts, 'rollout')}, {counted(report.num_tokens, 'token')}"
    causes = ", ".join(finding.cause for finding in report.findings)
    verdict = f"PASS: {compared}: rounding explains every difference" if report.passed else f"FAIL: {causes}"
    yield f"{verdict}; {folder / JSON_NAME}, {folder / PAGE_NAME}"


def write_rollout_report(report: RolloutReport, folder: Path) -> None:
    """Writes the JSON file and the page; raises MachineError if the folder cannot be written."""
    content = report.to_json()  # not below, where our own error would be blamed on the disk
    with disk_faults(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / JSON_NAME, content)
    write_page(folder / PAGE_NAME, rollout_page(report))


def rollout_page(report: RolloutReport) -> str:
    """Returns the page, from the verdict to every tried cause."""
    return render(
        "rollout.html",
        report=report,
        headline=_headline(report),
        notes=[
            f"{counted(report.num_rollouts, 'rollout')} of {report.file}, {counted(report.num_tokens, 'token')} that "
            f"the model drew. Model: {report.model}. {moment(report.created)}"
        ],
        curves=_curves(report, lambda number: []),
        figures=list(_figures(report)),
        json_name=JSON_NAME,
        limit=LIMIT,
    )


def _headline(report: RolloutReport) -> str:
    if report.passed:
        return "Engine and trainer compute what the weights say, as far as rounding can tell."
    return " ".join(finding.lines[0][0].upper() + finding.lines[0][1:] + "." for finding in report.findings)


def _figures(report: RolloutReport) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    if not report.sides:
        return
    limit = report.sides[0].allowed.worst
    by_token = _curves(
        report, lambda column: [(at, abs(row[1 + column])) for at, row in enumerate(report.tokens, start=1)]
    )
    yield from _figure("Every token", "difference in nats, by token of all answers", by_token, limit)
    positions = list(enumerate(report.positions, start=1))
    by_position = _curves(report, lambda column: [(at, row[column]) for at, row in positions])
    yield from _figure(
        "Position in the answer", "root mean square in nats, by position", by_position, report.sides[0].allowed.rms
    )


def _figure(
    caption: str, words: str, curves: Sequence[Curve], limit: float
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    named = f"{words}; what rounding explains: {limit:.1e}"
    if all(value == 0 for curve in curves for _, value in curve.points):
        yield caption, [(f"{words}: exactly 0 everywhere", "")]
    else:
        yield caption, [(named, difference_chart(f"{caption}: {named}, logarithmic", curves, limit))]


def _curves(report: RolloutReport, points: Callable[[int], list[tuple[int, float]]]) -> list[Curve]:
    curves = []
    for number, side in enumerate(report.sides[:2]):
        shown = tuple((at, value) for at, value in points(number) if not math.isnan(value))
        curves.append(Curve(str(number), side.name, number, shown, stands_out=not side.passed))
    return curves
