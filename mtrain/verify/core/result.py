"""Results of a check as data for its table, JSON file and page, and the diagnosis of a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from mtrain.base.spelling import counted
from mtrain.plan.search.hardware import MeasuredLinks
from mtrain.verify.report.text import (
    BACKEND,
    BEFORE_FORWARD,
    HF,
    IN_WORDS,
    MACHINE,
    PARITY,
    PREEMPT,
    RESUME,
    TENSOR_KINDS,
    TITLES,
    Count,
    ReportText,
)

FORMAT = 1
"""Version of the JSON file; raised when a field changes meaning."""

KINDS = ("samples", "lr", "denominator", "loss", "gradient", "grad_norm", "update", "rounding")
"""Kinds that parity compares, in the order of computation: the first that deviates is nearest to the cause. rounding:
float32 losses and gradients of models that are judged in float64."""
_ORDER = {kind: number for number, kind in enumerate(TITLES)}


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted deviation of a kind of quantity, with its derivation."""

    kind: str
    value: float
    formula: str
    """Formula as text, such as `4 u sqrt(n) (1 + sqrt(d))`."""
    inputs: dict[str, float]
    meaning: str
    """What is compared with what, and relative to what, in one or two sentences."""


@dataclass(frozen=True)
class Deviation:
    """Deviation of one quantity of one step."""

    kind: str
    """One of TITLES."""
    name: str
    """Term of a denominator or loss, parameter of a tensor, field of samples; otherwise the kind."""
    step: int
    """Step number, counted from 1 as in metrics.jsonl."""
    value: float
    """Relative deviation; inf if only the exact value is 0, nan if it is not a number. For non-numbers, such as
    samples: the share that differs."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """Says whether rounding explains the deviation; never for nan."""
        return self.value <= self.tolerance

    @property
    def excess(self) -> float:
        """Returns the deviation in units of its tolerance; inf for nan, or above a tolerance of 0."""
        if self.passed:
            return self.value / self.tolerance if self.tolerance > 0 else 0.0
        return self.value / self.tolerance if self.tolerance > 0 and not math.isnan(self.value) else math.inf


@dataclass(frozen=True)
class StepValues:
    """Values of one optimizer step."""

    step: int
    objective: float
    """Differentiated sum over terms of coefficient x mean."""
    means: dict[str, float]
    """Numerator / denominator of each term, in nats; 0 if the denominator is 0."""
    numerators: dict[str, float]
    denominators: dict[str, float]
    grad_norm: float
    """Gradient norm before clipping; 0 if the step was empty."""

    @classmethod
    def of(cls, step: int, objective: float, terms: Mapping[str, Sequence[float]], grad_norm: float) -> StepValues:
        """Makes the values of a step from mean, numerator and denominator of each term."""
        means, numerators, denominators = ({name: values[at] for name, values in terms.items()} for at in range(3))
        return cls(step, objective, means, numerators, denominators, grad_norm)


@dataclass(frozen=True)
class LayoutResult:
    """Result of one layout compared with the reference."""

    name: str
    """Such as `tp2sp-pp1-cp1-dp2-mbs1`."""
    axes: dict[str, str]
    """Axes in use beyond one process with one microbatch, such as {"tp": "2", "sp": "on"}. Possible axes: tp sp pp vpp
    stage_layers cp cp_comm ring dp shard ep etp microbatches."""
    num_ranks: int
    seconds: float
    steps: tuple[StepValues, ...] = ()
    expected: tuple[StepValues, ...] = ()
    """Exact values of these steps, each at the layout's weights before the step."""
    deviations: tuple[Deviation, ...] = ()
    guards: tuple[str, ...] = ()
    """Messages of the run's own checks, which would stop training."""
    error: str | None = None
    """Why the layout did not finish; None if it did."""
    exit_code: int = 0
    trace: str | None = None

    @property
    def passed(self) -> bool:
        """Says whether the layout finished, passed its own checks and every tolerance."""
        return self.error is None and not self.guards and all(deviation.passed for deviation in self.deviations)

    def worst(self, *kinds: str) -> Deviation | None:
        """Returns the deviation of these kinds that is largest relative to its tolerance; None if it has none."""
        return max((deviation for deviation in self.deviations if deviation.kind in kinds), key=badness, default=None)

    def worst_tensor(self) -> Deviation | None:
        """Returns the worst deviation of a tensor; None if no tensor deviates."""
        worst = self.worst(*TENSOR_KINDS)
        return None if worst is None or worst.value == 0 else worst

    def first_failure(self) -> Deviation | None:
        """Returns the first failure by step, kind (in the order of TITLES) and forward order."""
        failed = (deviation for deviation in self.deviations if not deviation.passed)
        return min(failed, key=lambda failure: (failure.step, _ORDER[failure.kind]), default=None)


def summary(result: LayoutResult) -> str:
    """Returns a progress line."""
    return f"{result.name}: {'pass' if result.passed else 'FAIL'} ({result.seconds:.1f} s)"


@dataclass(frozen=True)
class Diagnosis:
    """Location of a failure, as narrow as the layouts that ran can tell."""

    axis: str
    """Axis that fails alone, such as `cp`, a combination such as `tp x pp`, or `every layout`."""
    layout: str
    step: int | None = None
    kind: str | None = None
    """One of TITLES; None if the layout stopped with an error."""
    name: str | None = None
    value: float | None = None
    tolerance: float | None = None
    module: str | None = None
    """First module in forward order whose output deviates; None if all agree."""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """Report of a check."""

    text: ClassVar[ReportText]

    created: str
    """ISO 8601, UTC."""
    command: str
    environment: dict[str, str]
    config: dict[str, Any]
    changes: tuple[str, ...]
    """Changes by shrinking, such as `model.hidden_size: 4096 -> 64`."""
    data: str
    num_steps: int
    tolerances: tuple[Tolerance, ...]
    tensors: tuple[str, ...]
    """Names of all parameters in forward order."""
    reference: LayoutResult
    layouts: tuple[LayoutResult, ...]
    injected: str | None = None
    diagnosis: Diagnosis | None = None
    format: int = field(default=FORMAT)

    @property
    def passed(self) -> bool:
        """Says whether every layout passed."""
        return all(layout.passed for layout in self.layouts)

    @property
    def exit_code(self) -> int:
        """Returns 1 if a finished layout differs; else the code of the first error, or 0."""
        if any(not layout.passed for layout in self.layouts if layout.error is None):
            return 1
        return next((layout.exit_code for layout in self.layouts if layout.error is not None), 0)

    @property
    def verdict(self) -> str:
        """Returns PASS, FAIL (something differs) or UNFINISHED (unknown)."""
        return {0: "PASS", 1: "FAIL"}.get(self.exit_code, "UNFINISHED")

    @property
    def unfinished(self) -> str:
        """Says how many layouts did not finish, as a sentence without full stop."""
        count = sum(layout.error is not None for layout in self.layouts)
        return f"{count} of {counted(len(self.layouts), self.text.noun)} could not be run to the end"

    def in_words(self, agreement: str) -> str:
        """Says how many layouts pass; `agreement` is the sentence if all do."""
        failed = Count(sum(not layout.passed for layout in self.layouts))
        text = self.text.disagreement if failed else agreement
        return text.format(count=Count(len(self.layouts)), failed=failed)

    @property
    def compares_tensors(self) -> bool:
        """Says whether tensors were compared, each under its name."""
        return any(each.kind in TENSOR_KINDS for layout in self.layouts for each in layout.deviations)

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Returns the kinds in each column of the table; rounding only if models are judged in float64."""
        has_rounding = any(layout.worst("rounding") is not None for layout in self.layouts)
        return {name: kinds for name, kinds in self.text.columns.items() if name != "rounding" or has_rounding}

    def tolerance(self, kind: str) -> Tolerance:
        """Returns the tolerance of one of KINDS."""
        return next(tolerance for tolerance in self.tolerances if tolerance.kind == kind)

    def to_json(self) -> str:
        """Returns strict JSON; non-finite numbers become the texts "inf", "-inf" and "nan"."""
        return json.dumps(encoded(asdict(self)), allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True)
class ParityReport(Report):
    """Report of `mtrain verify parity`; the reference is one process with one batch in float64, without Megatron-Core's
    pipeline schedule, DDP and optimizer."""

    text = PARITY

    precision: str = "float32"
    """Precision of the judged losses and gradients; if float64, the kind `rounding` has the float32 ones."""

    @property
    def judged(self) -> str:
        """Says which precision was judged."""
        addition = "" if self.precision == "float32" else ", at the weights of the run, which is in float32"
        return f"Losses and gradients were judged in {self.precision}{addition}."


class ResumeReport(Report):
    """Report of `mtrain verify resume`; the reference is the run that never stopped."""

    text = RESUME


class PreemptReport(Report):
    """Report of `mtrain verify preempt`; the reference is the run that never stopped. Tensors are compared in files."""

    text = PREEMPT


class HfReport(Report):
    """Report of `mtrain verify hf`; the reference is the run in transformers; no tensors are compared."""

    text = HF


@dataclass(frozen=True)
class TimedReport(Report):
    """Report with measured times and a list of what was left out."""

    times: tuple[str, ...] = ()
    """Lines with measured times; `text.times` says which."""
    left_out: dict[str, str] = field(default_factory=dict)


class BackendReport(TimedReport):
    """Report of `mtrain verify backend`; the reference is one layer in float64, and `layouts` has the layers of
    candidates. `times` has forward and backward passes of each layer of a candidate."""

    text = BACKEND


@dataclass(frozen=True)
class MachineReport(TimedReport):
    """Report of `mtrain verify machine`; `layouts` has groups, layouts of several models, and resumed runs."""

    text = MACHINE

    links: MeasuredLinks | None = None
    """None if they could not be measured."""


def encoded(value: Any) -> Any:
    """Replaces non-finite numbers in nested values by the texts "inf", "-inf" and "nan"."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: encoded(item) for key, item in value.items()}
        case list() | tuple():
            return [encoded(item) for item in value]
        case _:
            return value


def badness(deviation: Deviation) -> tuple[float, float]:
    """Returns the sort key of deviations: in units of the tolerance, then by value; nan is worst."""
    return deviation.excess, math.inf if math.isnan(deviation.value) else deviation.value


EVERY_LAYOUT = "every layout"

Watched = Callable[[LayoutResult, int], str | None]
"""Function of a layout and a step, from 1: the first module whose output deviates, or None."""


def diagnosed(results: Sequence[LayoutResult], watched: Watched, text: ReportText) -> Diagnosis | None:
    """Returns the diagnosis; None if every layout passes.

    `watched` is called once, for the smallest layout that fails, and runs it again.
    """
    judged = _informative(results)
    axis = failing_axis(judged)
    if axis is None:
        return None
    if text.undecided and not any(result.passed for result in judged):
        axis = EVERY_LAYOUT  # nothing distinguishes the axes
    smallest = _smallest_failures(judged)[0]
    first = smallest.first_failure()
    module = watched(smallest, first.step) if first is not None and first.kind not in BEFORE_FORWARD else None
    lines = (_where(axis, smallest, first, text), _what(smallest, first, module, text))
    return Diagnosis(axis, smallest.name, **({} if first is None else asdict(first)), module=module, lines=lines)


def _informative(results: Sequence[LayoutResult]) -> list[LayoutResult]:
    """Drops a one-process layout that could not run if other layouts ran and none passes: it is not evidence."""
    if any(result.passed for result in results) or all(result.error is not None for result in results):
        return list(results)
    return [result for result in results if result.num_ranks > 1 or result.error is None]


def with_advice(diagnosis: Diagnosis | None, functions: Sequence[str]) -> Diagnosis | None:
    """Adds the contract of loss functions to the diagnosis if the user wrote some (`functions`)."""
    if diagnosis is None or not functions or diagnosis.axis == EVERY_LAYOUT:
        return diagnosis
    advice = (
        f"loss.function={', '.join(functions)} is yours: its numerator must be a sum over tokens, because microbatches "
        "and ranks are added up; a loss that is not linear in the tokens of a sequence takes their sum from "
        "TermInputs.sum_over_sequence and ends with weigh_sequences (docs/extending/loss.md)"
    )
    return replace(diagnosis, lines=(*diagnosis.lines, advice))


def failing_axis(results: Sequence[LayoutResult]) -> str | None:
    """Returns the axes that failing layouts share: `cp`, `tp x pp`, `dp, cp`, `every layout`; None if all pass.

    Axes of a smallest failing layout that pass in a subset of its axes are innocent. Axes that each fail alone are
    separated by commas; axes that fail only together are joined by x.
    """
    failures = _smallest_failures(results)
    if not failures:
        return None
    passing = [set(result.axes) for result in results if result.passed]
    names: dict[str, None] = {}
    for result in failures:
        used = set(result.axes)
        innocent = [axes for axes in passing if axes < used]
        left = [used - axes for axes in innocent if not any(axes < other for other in innocent)] or [used]
        together = set.union(*left) if len(left) > 1 and not set.intersection(*left) else set.intersection(*left)
        names[" x ".join(axis for axis in result.axes if axis in together) or EVERY_LAYOUT] = None
    return EVERY_LAYOUT if EVERY_LAYOUT in names else ", ".join(names)


def _smallest_failures(results: Sequence[LayoutResult]) -> list[LayoutResult]:
    """Returns the failing layouts, smallest first; skips a layout if another one fails with a subset of its axes."""
    failed = sorted(
        (result for result in results if not result.passed), key=lambda layout: (len(layout.axes), layout.num_ranks)
    )
    return [layout for layout in failed if not any(set(other.axes) < set(layout.axes) for other in failed)]


def _where(axis: str, result: LayoutResult, first: Deviation | None, text: ReportText) -> str:
    if axis == EVERY_LAYOUT:
        fails = text.undecided if text.undecided and result.num_ranks > 1 else text.everything
    else:
        fails = f"each of {axis} alone breaks the run" if ", " in axis else f"{axis} alone breaks the run"
    when = f", step {first.step}" if first is not None else ""
    shown = f"{text.noun} {result.name} ({counted(result.num_ranks, 'rank')}){when}"
    return f"mtrain verify {text.verb}: {fails}; smallest {shown}"


def _what(result: LayoutResult, first: Deviation | None, module: str | None, text: ReportText) -> str:
    if first is None:
        return f"stopped: {result.error or '; '.join(result.guards)}"
    quantity = IN_WORDS[first.kind].format(name=first.name)
    amount = f"{first.value:.1e} (tolerance {first.tolerance:.1e})"
    agreed = text.agreed_before(first.kind, {one.kind for one in result.deviations if one.step == first.step})
    if "gradient" not in text.maps or first.kind in BEFORE_FORWARD:
        return f"first deviation: {quantity} by {amount}{agreed}"
    forward = f"first module that deviates: {module}" if module else "outputs of all modules agree"
    return f"first deviation: {quantity} by {amount}{agreed}; {forward}"
