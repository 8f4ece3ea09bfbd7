"""What a check found, as data: the table, the JSON file and the page are made from this alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from mtrain.base.errors import DataError
from mtrain.verify.report.text import HF, PARITY, PREEMPT, RESUME, TENSOR_KINDS, TITLES, ReportText

FORMAT = 1
"""Of the JSON file; raised when a field changes its meaning."""

KINDS = ("samples", "lr", "denominator", "loss", "gradient", "grad_norm", "update")
"""Kinds that parity compares, in the order in which a step computes them: the first that deviates is nearest to the
cause."""
_ORDER = {kind: number for number, kind in enumerate(TITLES)}


@dataclass(frozen=True)
class Tolerance:
    """How far a quantity may be from the exact one, and why."""

    kind: str
    """One of KINDS."""
    value: float
    """Largest relative deviation that rounding can explain."""
    formula: str
    """As text, such as `4 u sqrt(n) (1 + sqrt(d))`."""
    inputs: dict[str, float]
    """Value of every symbol of the formula."""
    meaning: str
    """What is compared with what, and relative to what; one or two sentences."""


@dataclass(frozen=True)
class Deviation:
    """How far one quantity of one step is from the exact one."""

    kind: str
    """One of TITLES."""
    name: str
    """denominator, loss: the term. Kinds of tensors: the parameter. samples: what of the rows. Others: the kind."""
    step: int
    """Counted from 1, as in metrics.jsonl."""
    value: float
    """Relative; inf where the exact value is 0 and this one is not, nan where it is not a number. Of what is no number,
    such as samples: the share that differs."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains it; never for nan."""
        return self.value <= self.tolerance

    @property
    def excess(self) -> float:
        """In tolerances: 1 is the edge; inf for nan, and where a tolerance of 0 is exceeded."""
        if self.passed:
            return self.value / self.tolerance if self.tolerance > 0 else 0.0
        return self.value / self.tolerance if self.tolerance > 0 and not math.isnan(self.value) else math.inf


@dataclass(frozen=True)
class StepValues:
    """One optimizer step of one run."""

    step: int
    """Counted from 1."""
    objective: float
    """Sum over terms of coefficient x mean: what was differentiated."""
    means: dict[str, float]
    """Term -> numerator / denominator, in nats; 0 where the denominator is 0."""
    numerators: dict[str, float]
    denominators: dict[str, float]
    grad_norm: float
    """Before clipping; 0 where the step was empty."""


@dataclass(frozen=True)
class LayoutResult:
    """One layout against the reference."""

    name: str
    """Such as `tp2sp-pp1-cp1-dp2-mbs1`."""
    axes: dict[str, str]
    """What it uses beyond one process with one microbatch: axis -> value, such as {"tp": "2", "sp": "on"}. Axes:
    tp sp pp vpp stage_layers cp cp_comm ring dp microbatches."""
    num_ranks: int
    seconds: float
    steps: tuple[StepValues, ...] = ()
    """What the layout reported."""
    expected: tuple[StepValues, ...] = ()
    """The exact values of the same steps, each at the weights that the layout had before the step."""
    deviations: tuple[Deviation, ...] = ()
    """Of every step, kind and name."""
    guards: tuple[str, ...] = ()
    """What the run's own checks said; a training run would have stopped there."""
    error: str | None = None
    """Why the layout could not be run to its end."""

    @property
    def passed(self) -> bool:
        """Whether every deviation is within its tolerance and nothing was refused."""
        return self.error is None and not self.guards and all(each.passed for each in self.deviations)

    def worst(self, *kinds: str) -> Deviation | None:
        """The deviation of these kinds that exceeds its tolerance most; None where there is none of them."""
        return max((each for each in self.deviations if each.kind in kinds), key=badness, default=None)

    def worst_tensor(self) -> Deviation | None:
        """The worst deviation of a tensor; None where every tensor is the same."""
        worst = self.worst(*TENSOR_KINDS)
        return None if worst is None or worst.value == 0 else worst

    def first_failure(self) -> Deviation | None:
        """The first in time: by step, then by kind in the order of TITLES, then in the order of the forward pass."""
        failed = (each for each in self.deviations if not each.passed)
        return min(failed, key=lambda each: (each.step, _ORDER[each.kind]), default=None)


def summary(result: LayoutResult) -> str:
    """One line of progress."""
    return f"{result.name}: {'pass' if result.passed else 'FAIL'} ({result.seconds:.1f} s)"


@dataclass(frozen=True)
class Diagnosis:
    """Where parity breaks, as narrowly as the layouts that ran can tell."""

    axis: str
    """The axis that fails alone, such as `cp`; `every layout`; or a combination such as `tp x pp`."""
    layout: str
    """The smallest layout that fails."""
    step: int | None
    kind: str | None
    """One of TITLES; None where the layout stopped with an error."""
    name: str | None
    """Term or tensor."""
    value: float | None
    tolerance: float | None
    module: str | None
    """The first module of the forward pass whose output deviates; None where all of them agree."""
    lines: tuple[str, ...]
    """To paste into a bug report."""


@dataclass(frozen=True)
class Report:
    """Everything that was compared."""

    text: ClassVar[ReportText]
    """Of the check that this is a report of."""

    created: str
    """ISO 8601, UTC."""
    command: str
    environment: dict[str, str]
    """Versions, device, backend."""
    config: dict[str, Any]
    """The shrunk configuration that ran, section by section."""
    changes: tuple[str, ...]
    """What shrinking changed, such as `model.hidden_size: 4096 -> 64`."""
    data: str
    """Where the samples came from, in words, one phrase for each stretch of steps."""
    num_steps: int
    tolerances: tuple[Tolerance, ...]
    """One for each of KINDS."""
    tensors: tuple[str, ...]
    """Names of all parameters in the order of the forward pass."""
    reference: LayoutResult
    """What the others are compared with."""
    layouts: tuple[LayoutResult, ...]
    injected: str | None = None
    """Name of the fault that was planted by `--inject`."""
    diagnosis: Diagnosis | None = None
    """Where something failed."""
    format: int = field(default=FORMAT)

    @property
    def passed(self) -> bool:
        """Whether every layout is the same run."""
        return all(layout.passed for layout in self.layouts)

    def tolerance(self, kind: str) -> Tolerance:
        """The tolerance of one of KINDS."""
        return next(each for each in self.tolerances if each.kind == kind)

    def to_json(self) -> str:
        """Strict JSON: numbers that are not finite become the texts "inf", "-inf" and "nan"."""
        return json.dumps(_encoded(asdict(self)), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote.

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
    """Of `mtrain verify parity`; the reference is one process with one batch in float64, without pipeline schedule, DDP
    or optimizer of Megatron-Core."""

    text = PARITY


@dataclass(frozen=True)
class ResumeReport(Report):
    """Of `mtrain verify resume`; the reference is the run that never stopped."""

    text = RESUME


@dataclass(frozen=True)
class PreemptReport(Report):
    """Of `mtrain verify preempt`; the reference is the run that nothing stopped, and no tensor is compared but in
    files."""

    text = PREEMPT


@dataclass(frozen=True)
class HfReport(Report):
    """Of `mtrain verify hf`; the reference is the run in transformers, and no tensor is compared."""

    text = HF


_TEXTS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _encoded(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {key: _encoded(item) for key, item in value.items()}
        case list() | tuple():
            return [_encoded(item) for item in value]
        case _:
            return value


def _number(value: Any) -> float:
    return _TEXTS[value] if isinstance(value, str) else float(value)


def _members(content: dict[str, Any]) -> dict[str, Any]:
    diagnosis = content["diagnosis"]
    return {
        "changes": tuple(content["changes"]),
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
    """Orders deviations: by tolerances, then by value, nan above all."""
    return deviation.excess, math.inf if math.isnan(deviation.value) else deviation.value
