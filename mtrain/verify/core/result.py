"""Results of a check as data, from which alone the table, the JSON file and the page are made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from mtrain.base.errors import DataError
from mtrain.verify.report.text import BACKEND, HF, PARITY, PREEMPT, RESUME, TENSOR_KINDS, TITLES, ReportText

FORMAT = 1
"""Version of the JSON file; raised when a field changes its meaning."""

KINDS = ("samples", "lr", "denominator", "loss", "gradient", "grad_norm", "update", "rounding")
"""Kinds that parity compares, in the order in which a step computes them: the first that deviates is nearest to the
cause. rounding: losses and gradients of float32, where those of float64 are judged."""
_ORDER = {kind: number for number, kind in enumerate(TITLES)}


@dataclass(frozen=True)
class Tolerance:
    """Largest deviation of a kind of quantity that is accepted, with its derivation."""

    kind: str
    """Kind of quantity, one of KINDS."""
    value: float
    """Largest relative deviation that rounding can explain."""
    formula: str
    """Formula of the value as text, such as `4 u sqrt(n) (1 + sqrt(d))`."""
    inputs: dict[str, float]
    """Value of every symbol of the formula."""
    meaning: str
    """Explanation of what is compared with what, and relative to what, in one or two sentences."""


@dataclass(frozen=True)
class Deviation:
    """Deviation of one quantity of one step from the exact one."""

    kind: str
    """Kind of quantity, one of TITLES."""
    name: str
    """Name within the kind: the term of a denominator or loss, the parameter of a tensor, the field of samples, else
    the kind itself."""
    step: int
    """Number of the step, counted from 1 as in metrics.jsonl."""
    value: float
    """Relative deviation; inf if the exact value is 0 and this one is not, nan if it is not a number. For quantities
    that are no numbers, such as samples: the share that differs."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """Says whether rounding explains it; never for nan."""
        return self.value <= self.tolerance

    @property
    def excess(self) -> float:
        """Returns the deviation in units of its tolerance; inf for nan, and if a tolerance of 0 is exceeded."""
        if self.passed:
            return self.value / self.tolerance if self.tolerance > 0 else 0.0
        return self.value / self.tolerance if self.tolerance > 0 and not math.isnan(self.value) else math.inf


@dataclass(frozen=True)
class StepValues:
    """Values of one optimizer step of one run."""

    step: int
    """Number of the step, counted from 1."""
    objective: float
    """Sum over terms of coefficient x mean, which was differentiated."""
    means: dict[str, float]
    """Mean of each term, numerator / denominator, in nats; 0 if the denominator is 0."""
    numerators: dict[str, float]
    denominators: dict[str, float]
    grad_norm: float
    """Gradient norm before clipping; 0 if the step was empty."""


@dataclass(frozen=True)
class LayoutResult:
    """Result of one layout compared with the reference."""

    name: str
    """Name of the layout, such as `tp2sp-pp1-cp1-dp2-mbs1`."""
    axes: dict[str, str]
    """Axes that the layout uses beyond one process with one microbatch, such as {"tp": "2", "sp": "on"}. Possible axes:
    tp sp pp vpp stage_layers cp cp_comm ring dp ep etp microbatches."""
    num_ranks: int
    seconds: float
    steps: tuple[StepValues, ...] = ()
    """Values that the layout reported."""
    expected: tuple[StepValues, ...] = ()
    """Exact values of the same steps, each at the weights that the layout had before the step."""
    deviations: tuple[Deviation, ...] = ()
    """Deviations of every step, kind and name."""
    guards: tuple[str, ...] = ()
    """Messages of the run's own checks, at which a training run would have stopped."""
    error: str | None = None
    """Reason why the layout could not be run to its end; None if it could."""
    exit_code: int = 0
    """Exit code of this error; 0 if there is none."""
    trace: str | None = None
    """Traceback of an error that nobody foresaw; None for others."""

    @property
    def passed(self) -> bool:
        """Says whether every deviation is within its tolerance and nothing was refused."""
        return self.error is None and not self.guards and all(each.passed for each in self.deviations)

    def worst(self, *kinds: str) -> Deviation | None:
        """Returns the deviation of these kinds that is largest relative to its tolerance; None if there is none."""
        return max((each for each in self.deviations if each.kind in kinds), key=badness, default=None)

    def worst_tensor(self) -> Deviation | None:
        """Returns the worst deviation of a tensor; None if no tensor deviates."""
        worst = self.worst(*TENSOR_KINDS)
        return None if worst is None or worst.value == 0 else worst

    def first_failure(self) -> Deviation | None:
        """Returns the first failure: by step, then by kind in the order of TITLES, then in forward order."""
        failed = (each for each in self.deviations if not each.passed)
        return min(failed, key=lambda each: (each.step, _ORDER[each.kind]), default=None)


def summary(result: LayoutResult) -> str:
    """Returns a line of progress."""
    return f"{result.name}: {'pass' if result.passed else 'FAIL'} ({result.seconds:.1f} s)"


@dataclass(frozen=True)
class Diagnosis:
    """Place where a check fails, as narrowly as the layouts that ran can tell."""

    axis: str
    """Axis that fails alone, such as `cp`, a combination such as `tp x pp`, or `every layout`."""
    layout: str
    """Smallest layout that fails."""
    step: int | None
    kind: str | None
    """Kind of quantity, one of TITLES; None if the layout stopped with an error."""
    name: str | None
    """Name of the term or tensor."""
    value: float | None
    tolerance: float | None
    module: str | None
    """First module of the forward pass whose output deviates; None if all agree."""
    lines: tuple[str, ...]
    """Lines to paste into a bug report."""


@dataclass(frozen=True)
class Report:
    """Report of a check: everything that was compared."""

    text: ClassVar[ReportText]
    """Texts of the check."""

    created: str
    """Time of the report, ISO 8601, UTC."""
    command: str
    environment: dict[str, str]
    """Versions, device and backend."""
    config: dict[str, Any]
    """Shrunk configuration that ran, section by section."""
    changes: tuple[str, ...]
    """Changes made by shrinking, such as `model.hidden_size: 4096 -> 64`."""
    data: str
    """Source of the samples in words, one phrase for each range of steps."""
    num_steps: int
    tolerances: tuple[Tolerance, ...]
    """Tolerances of the kinds that the check compares with one."""
    tensors: tuple[str, ...]
    """Names of all parameters in the order of the forward pass."""
    reference: LayoutResult
    """Result of the reference, with which the layouts are compared."""
    layouts: tuple[LayoutResult, ...]
    injected: str | None = None
    """Name of the fault that was planted by `--inject`; None if none was."""
    diagnosis: Diagnosis | None = None
    """Diagnosis if something failed, else None."""
    format: int = field(default=FORMAT)

    @property
    def passed(self) -> bool:
        """Says whether every layout passed."""
        return all(layout.passed for layout in self.layouts)

    @property
    def exit_code(self) -> int:
        """Returns 1 if a layout that ran to its end differs; else the code of the first error, 0 without any."""
        if any(not layout.passed for layout in self.layouts if layout.error is None):
            return 1
        return next((layout.exit_code for layout in self.layouts if layout.error is not None), 0)

    @property
    def verdict(self) -> str:
        """Returns PASS, FAIL where something differs, or UNFINISHED where that is not known."""
        return {0: "PASS", 1: "FAIL"}.get(self.exit_code, "UNFINISHED")

    @property
    def unfinished(self) -> str:
        """Says how many layouts were not run to their end, as a sentence without its stop."""
        count = sum(layout.error is not None for layout in self.layouts)
        return f"{count} of {len(self.layouts)} {self.text.noun}s could not be run to the end"

    @property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Returns the kinds of each column of the table; only models that are judged in float64 have one of float32's
        rounding."""
        has_rounding = any(layout.worst("rounding") is not None for layout in self.layouts)
        return {name: kinds for name, kinds in self.text.columns.items() if name != "rounding" or has_rounding}

    def tolerance(self, kind: str) -> Tolerance:
        """Returns the tolerance of one of KINDS."""
        return next(each for each in self.tolerances if each.kind == kind)

    def to_json(self) -> str:
        """Returns strict JSON: numbers that are not finite become the texts "inf", "-inf" and "nan"."""
        return json.dumps(encoded(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a report that `to_json` wrote.

        Raises:
            DataError: the text is no report, or one of another format.
        """
        verb = cls.text.verb
        try:
            content = json.loads(text)
            found = content["format"]
            if found != FORMAT:
                raise DataError(f"the {verb} report has format {found}, but this version reads {FORMAT}; run it again")
            return cls(**{**content, **_members(content)})
        except (ValueError, KeyError, TypeError) as fault:
            raise DataError(f"the text is not a {verb} report ({fault}); run `mtrain verify {verb}` again") from fault


@dataclass(frozen=True)
class ParityReport(Report):
    """Report of `mtrain verify parity`; the reference is one process with one batch in float64, without pipeline
    schedule, DDP or optimizer of Megatron-Core."""

    text = PARITY

    precision: str = "float32"
    """Precision in which steps were computed for their losses and gradients to be judged; with float64, those of the
    run itself in float32 are the kind `rounding`."""

    @property
    def judged(self) -> str:
        """Says which precision was judged."""
        own = "" if self.precision == "float32" else ", at the weights of the run, which is in float32"
        return f"Losses and gradients were judged in {self.precision}{own}."


@dataclass(frozen=True)
class ResumeReport(Report):
    """Report of `mtrain verify resume`; the reference is the run that never stopped."""

    text = RESUME


@dataclass(frozen=True)
class PreemptReport(Report):
    """Report of `mtrain verify preempt`; the reference is the run that nothing stopped. Tensors are compared in files
    only."""

    text = PREEMPT


@dataclass(frozen=True)
class HfReport(Report):
    """Report of `mtrain verify hf`; the reference is the run in transformers, and no tensor is compared."""

    text = HF


@dataclass(frozen=True)
class BackendReport(Report):
    """Report of `mtrain verify backend`; the reference is one layer in float64, and what takes the place of a layout is
    a layer of one candidate."""

    text = BACKEND

    times: tuple[str, ...] = ()
    """Times of forward and backward pass as lines, one for each layer of a candidate."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reason for each candidate that was not compared."""


_TEXTS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encoded(value: Any) -> Any:
    """Replaces numbers that are not finite in nested values by the texts "inf", "-inf" and "nan"."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: encoded(item) for key, item in value.items()}
        case list() | tuple():
            return [encoded(item) for item in value]
        case _:
            return value


def _number(value: Any) -> float:
    return _TEXTS[value] if isinstance(value, str) else float(value)


def _members(content: dict[str, Any]) -> dict[str, Any]:
    diagnosis = content["diagnosis"]
    return {
        "changes": tuple(content["changes"]),
        **({"times": tuple(content["times"])} if "times" in content else {}),
        "tensors": tuple(content["tensors"]),
        "tolerances": tuple(Tolerance(**each) for each in content["tolerances"]),
        "reference": _layout(content["reference"]),
        "layouts": tuple(_layout(each) for each in content["layouts"]),
        "diagnosis": None if diagnosis is None else _diagnosis(diagnosis),
    }


def _diagnosis(content: dict[str, Any]) -> Diagnosis:
    numbers = {key: None if content[key] is None else _number(content[key]) for key in ("value", "tolerance")}
    return Diagnosis(**{**content, **numbers, "lines": tuple(content["lines"])})


def _layout(content: dict[str, Any]) -> LayoutResult:
    parts = {
        "steps": tuple(_step(each) for each in content["steps"]),
        "expected": tuple(_step(each) for each in content["expected"]),
        "deviations": tuple(_deviations(content["deviations"])),
        "guards": tuple(content["guards"]),
    }
    return LayoutResult(**{**content, **parts})


def _deviations(content: list[dict[str, Any]]) -> Iterator[Deviation]:
    for each in content:
        yield Deviation(**{**each, "value": _number(each["value"]), "tolerance": _number(each["tolerance"])})


def _step(content: dict[str, Any]) -> StepValues:
    numbers = {key: _number(content[key]) for key in ("objective", "grad_norm")}
    by_term = {
        key: {term: _number(value) for term, value in content[key].items()}
        for key in ("means", "numerators", "denominators")
    }
    return StepValues(**{**content, **numbers, **by_term})


def badness(deviation: Deviation) -> tuple[float, float]:
    """Returns the key by which deviations are ordered: in units of the tolerance, then by value, with nan the worst."""
    return deviation.excess, math.inf if math.isnan(deviation.value) else deviation.value
