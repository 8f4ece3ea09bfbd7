"""Compares two run folders: where configuration, environment and numbers differ, and what rounding allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, assert_never, get_args

from mtrain.base.errors import ConfigError, DataError
from mtrain.config.changes import Change, changes, flat_keys
from mtrain.config.derived import DROPOUT_KEYS, LAYOUT_DEPENDENT_KEYS
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.report.metrics.plot import distinct_names, load_curves
from mtrain.report.metrics.record import StepRecord
from mtrain.runs.folder import RunFolder

FULL_RTOL = 1e-5
"""Tolerance of float32, and of learning rates, which are float64 in every precision."""

UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff below float32, finer first: 2^-p for p significant bits."""

NORM_ROUNDINGS = 10
"""Factor for gradient norms. A gradient has about 26 roundings per layer, forward and backward; independent ones add up
as squares, to 10 for four layers. A loss has half of them, and its mean over tokens makes their errors smaller: 1."""


@dataclass(frozen=True)
class Allowed:
    """Largest relative differences that count as equal."""

    loss: float
    grad_norm: float
    lr: float
    reason: str
    """Origin of the tolerances, for people."""

    def __str__(self) -> str:
        if self.loss == self.grad_norm:
            return f"{self.loss:.0e}"
        return f"{self.loss:.0e} (losses) and {self.grad_norm:.0e} (gradient norms)"


def allowed(rtol: float | None, precisions: Sequence[str | None]) -> Allowed:
    """Returns the tolerances of `--rtol`, else those that rounding in the coarser of the runs' precisions needs.

    Args:
        rtol: Tolerance from the user; None: the precision decides.
        precisions: `train.precision` of each run; None if it was not recorded.
    """
    if rtol is not None:
        return Allowed(rtol, rtol, rtol, "--rtol")
    coarse = [precision for precision in UNIT_ROUNDOFF if precision in precisions]
    if not coarse:
        return Allowed(FULL_RTOL, FULL_RTOL, FULL_RTOL, "for fp32; --rtol sets another")
    unit = UNIT_ROUNDOFF[coarse[-1]]
    reason = f"by the rounding of {coarse[-1]}, at first: later steps amplify it; --rtol sets another"
    return Allowed(unit, NORM_ROUNDINGS * unit, FULL_RTOL, reason)


def expected_difference(
    configs: Sequence[Mapping[str, Any]],
    changes: Sequence[Change],
    environments: Sequence[Mapping[str, str] | None],
) -> str | None:
    """Explains why the two runs differ by definition; None if they should not.

    Args:
        configs: Dotted key -> value, for each run.
        environments: Environments of both runs; None if not recorded.
    """
    keys = [key for key in (*DROPOUT_KEYS, *LAYOUT_DEPENDENT_KEYS) if any(config.get(key) for config in configs)]
    if not keys:
        return None
    places = [change.key for change in changes if change.key.startswith("layout.")]
    places += [change.key for change in changes if change.key == "train.micro_batch_size"]
    a, b = environments
    if a is None or b is None:
        places.append("the world size (not recorded)")
    else:
        places += [name for name in ("world_size", "device") if a.get(name) != b.get(name)]
    if not places:
        return None
    return (
        f"{' and '.join(keys)} above 0 {'makes' if len(keys) == 1 else 'make'} the numbers follow {', '.join(places)}"
    )


Kind = Literal["denominator", "loss", "grad_norm", "lr"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds in the order in which a step computes them: the first that differs is nearest to the cause."""

DENOMINATOR_RTOL = 1e-12
"""Tolerance of denominators, sums of float64: counts below 1e12 must be equal, fractional weights but for the order."""


@dataclass(frozen=True)
class Quantity:
    """A number that both runs record at each step, over their shared steps."""

    kind: Kind
    name: str
    """Name of the kind, with the term if there are several, such as `loss of z`."""
    steps: tuple[int, ...]
    a: tuple[float, ...]
    """Values of run A; nan if it has none."""
    b: tuple[float, ...]
    rtol: float
    """Largest relative difference that counts as equal."""

    @cached_property
    def differences(self) -> tuple[float, ...]:
        """Relative difference at each step."""
        return tuple(relative_difference(a, b) for a, b in zip(self.a, self.b, strict=True))

    @property
    def worst(self) -> float:
        """Largest relative difference."""
        return max(self.differences)

    def first_step_beyond(self, rtol: float) -> int | None:
        """Returns the first step whose relative difference is larger than `rtol`; None if there is none."""
        pairs = zip(self.steps, self.differences, strict=True)
        return next((step for step, difference in pairs if difference > rtol), None)


@dataclass(frozen=True)
class FirstDivergence:
    step: int
    name: str
    """Name of the quantity."""
    a: float
    b: float
    difference: float
    """Relative difference."""
    rtol: float

    def __str__(self) -> str:
        pairs = ((f"{self.a:.{digits}g}", f"{self.b:.{digits}g}") for digits in range(6, 18))
        a, b = next(pair for pair in pairs if pair[0] != pair[1])  # as many digits as tell them apart: 17 always do
        return (
            f"step {self.step}, {self.name}: {a} and {b}, relative difference {self.difference:.1e} "
            f"(tolerance {self.rtol:.0e})"
        )


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two runs."""

    names: tuple[str, str]
    """Names of the two runs, distinct."""
    num_steps: tuple[int, int]
    """Steps that each run has recorded."""
    allowed: Allowed
    """Tolerances of losses, gradient norms and learning rates."""
    expected: str | None
    """Why the runs differ by definition; None if they should not."""
    changes: tuple[Change, ...]
    """Changes of the configuration, `old` from A and `new` from B."""
    environment: tuple[Change, ...]
    """Changes of the environment, which may explain differences in the last digits only."""
    tokens: tuple[str, str]
    """Description of the tokens in each run's shared steps."""
    on_the_way: tuple[str, ...]
    """Keys that a run changed at a later start."""
    unrecorded: tuple[str, ...]
    """Runs that have not recorded their environment."""
    quantities: tuple[Quantity, ...]
    """Quantities in the order of KINDS, the main term first."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that both runs have."""
        return self.quantities[0].steps

    @property
    def divergence(self) -> FirstDivergence | None:
        """First divergence by step, then in the order of the quantities; None if the runs are equal."""
        found = [
            (step, place)
            for place, quantity in enumerate(self.quantities)
            if (step := quantity.first_step_beyond(quantity.rtol)) is not None
        ]
        if not found:
            return None
        step, place = min(found)
        quantity = self.quantities[place]
        index = quantity.steps.index(step)
        a, b, difference = quantity.a[index], quantity.b[index], quantity.differences[index]
        return FirstDivergence(step, quantity.name, a, b, difference, quantity.rtol)


def compare_runs(run_a: Path, run_b: Path, rtol: float | None) -> Comparison:
    """Compares two run folders, even while the runs are in progress.

    Args:
        rtol: Largest relative difference of losses, gradient norms and learning rates that counts as equal; None uses
            the rounding of the runs' precision. Denominators must be equal.

    Raises:
        ConfigError: `rtol` is negative or not finite.
        DataError: A folder lacks its configuration or metrics, a file is damaged, or the runs have no step in common.
        MachineError: A file cannot be read.
    """
    if rtol is not None and not 0 <= rtol < math.inf:
        raise ConfigError(f"--rtol must be a number from 0 on, but is {rtol}; give one such as 1e-5")
    curves = [load_curves(run) for run in (run_a, run_b)]
    recorded = [{record.step: record for record in each.steps} for each in curves]
    shared = sorted(recorded[0].keys() & recorded[1].keys())
    if not shared:
        raise DataError(
            f"{run_a} and {run_b} have no step in common ({_span(recorded[0])} and {_span(recorded[1])}); compare runs "
            "whose steps overlap"
        )
    name_a, name_b = distinct_names([run_a, run_b])
    environments = [RunFolder(run).saved_environment() for run in (run_a, run_b)]
    texts = [_config_text(run) for run in (run_a, run_b)]
    configs, config_changes = [flat_keys(text) for text in texts], changes(*texts)
    tolerances = allowed(rtol, [config.get("train.precision") for config in configs])
    return Comparison(
        names=(name_a, name_b),
        num_steps=(len(recorded[0]), len(recorded[1])),
        allowed=tolerances,
        expected=expected_difference(configs, config_changes, environments),
        changes=tuple(config_changes),
        environment=tuple(_environment_changes(*environments)),
        on_the_way=tuple(
            f"{name} after step {change.step}: {change}"
            for name, each in zip((name_a, name_b), curves, strict=True)
            for change in each.changes
        ),
        unrecorded=tuple(name for name, shown in zip((name_a, name_b), environments, strict=True) if shown is None),
        tokens=(_tokens([recorded[0][step] for step in shared]), _tokens([recorded[1][step] for step in shared])),
        quantities=tuple(_quantities([(recorded[0][step], recorded[1][step]) for step in shared], tolerances)),
    )


def relative_difference(a: float, b: float) -> float:
    """Returns |a - b| / max(|a|, |b|): 0 if both are the same, including nan; inf if only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    return abs(a / largest - b / largest)


def _tokens(records: Sequence[StepRecord]) -> str:
    text, seconds = sum(record.tokens for record in records), sum(record.seconds for record in records)
    pace = f"{text / seconds:,.0f} a second" if seconds > 0 else "in no time"
    known = [record for record in records if record.padding_tokens is not None and record.loss_tokens is not None]
    if len(known) < len(records):
        return f"{text:,} (padding not counted apart), {pace}"
    padding, loss = (sum(getattr(record, name) for record in known) for name in ("padding_tokens", "loss_tokens"))
    return f"{text:,} of text, {loss:,} of them in the loss, and {padding:,} of padding; {pace}"


def _span(records: Mapping[int, StepRecord]) -> str:
    return f"steps {min(records)} to {max(records)}" if records else "no steps"


def _config_text(run: Path) -> str:
    text = RunFolder(run).saved_config()
    if text is None:
        raise DataError(f"{run}/config.yaml is not there; give the run.dir of a run")
    return text


def _environment_changes(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> list[Change]:
    if a is None or b is None:
        return []
    return [
        Change(key, a.get(key), b.get(key), True) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
    ]


def _quantities(pairs: list[tuple[StepRecord, StepRecord]], allowed: Allowed) -> list[Quantity]:
    side_terms = sorted({term for pair in pairs for record in pair for term in record.terms} - {MAIN_TERM})
    names: dict[str, tuple[Kind, str, float]] = {
        "denominator": ("denominator", "", DENOMINATOR_RTOL),
        **{f"denominator of {term}": ("denominator", term, DENOMINATOR_RTOL) for term in side_terms},
        "loss": ("loss", "", allowed.loss),
        **{f"loss of {term}": ("loss", term, allowed.loss) for term in side_terms},
        "gradient norm": ("grad_norm", "", allowed.grad_norm),
        "learning rate": ("lr", "", allowed.lr),
    }
    steps = tuple(a.step for a, _ in pairs)
    return [
        Quantity(
            kind,
            name,
            steps,
            tuple(_value(a, kind, term) for a, _ in pairs),
            tuple(_value(b, kind, term) for _, b in pairs),
            rtol,
        )
        for name, (kind, term, rtol) in names.items()
    ]


def _value(record: StepRecord, kind: Kind, term: str) -> float:
    """Returns a record's number; nan for a missing term and for the loss of a step without loss tokens."""
    match kind:
        case "denominator" | "loss" if term:
            shown = record.terms.get(term)
            return math.nan if shown is None else shown.denominator if kind == "denominator" else shown.loss
        case "denominator":
            return record.denominator
        case "loss":
            return math.nan if record.empty else record.loss
        case "grad_norm":
            return record.grad_norm
        case "lr":
            return record.lr
        case _:
            assert_never(kind)
