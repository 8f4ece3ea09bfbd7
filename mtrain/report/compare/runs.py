"""Compares two run folders: where configuration, environment and numbers differ, and what rounding allows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, assert_never

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
    """Returns the tolerances of `--rtol`; if None, those for rounding in the coarsest of the recorded precisions."""
    if rtol is not None:
        return Allowed(rtol, rtol, rtol, "--rtol")
    coarse = [precision for precision in UNIT_ROUNDOFF if precision in precisions]
    if not coarse:
        return Allowed(FULL_RTOL, FULL_RTOL, FULL_RTOL, "for fp32; --rtol sets another")
    unit = UNIT_ROUNDOFF[coarse[-1]]
    reason = f"by the rounding of {coarse[-1]}, at first: later steps amplify it; --rtol sets another"
    return Allowed(unit, NORM_ROUNDINGS * unit, FULL_RTOL, reason)


def expected_difference(
    configs: Sequence[Mapping[str, Any]], changes: Sequence[Change], environments: Sequence[Mapping[str, str] | None]
) -> str | None:
    """Returns why runs with these dotted keys and environments differ by definition; None if they should not."""
    keys = [key for key in (*DROPOUT_KEYS, *LAYOUT_DEPENDENT_KEYS) if any(config.get(key) for config in configs)]
    if not keys:
        return None
    causes = [change.key for change in changes if change.key.startswith("layout.")]
    causes += [change.key for change in changes if change.key == "train.micro_batch_size"]
    a, b = environments
    if a is None or b is None:
        causes.append("the world size (not recorded)")
    else:
        causes += [name for name in ("world_size", "device") if a.get(name) != b.get(name)]
    if not causes:
        return None
    return (
        f"{' and '.join(keys)} above 0 {'makes' if len(keys) == 1 else 'make'} the numbers follow {', '.join(causes)}"
    )


Kind = Literal["denominator", "loss", "grad_norm", "lr"]
"""Kinds in the order in which a step computes them: the first that differs is nearest to the cause."""

DENOMINATOR_RTOL = 1e-12
"""Tolerance of denominators, which are float64 sums: counts below 1e12 must be equal, other weights nearly."""


@dataclass(frozen=True)
class Quantity:
    """A number that both runs record at each step, over their shared steps."""

    kind: Kind
    name: str
    """Name of the kind, with the term unless it is the main one, such as `loss of z`."""
    steps: tuple[int, ...]
    a: tuple[float, ...]
    """Values of run A; nan if it has none."""
    b: tuple[float, ...]
    rtol: float

    @cached_property
    def differences(self) -> tuple[float, ...]:
        return tuple(relative_difference(a, b) for a, b in zip(self.a, self.b, strict=True))

    @property
    def worst(self) -> float:
        return max(self.differences)

    def first_step_beyond(self, rtol: float) -> int | None:
        """Returns the first step whose relative difference exceeds `rtol`; None if none does."""
        pairs = zip(self.steps, self.differences, strict=True)
        return next((step for step, difference in pairs if difference > rtol), None)


class FirstDivergence(NamedTuple):
    step: int
    quantity: Quantity

    @property
    def name(self) -> str:
        return self.quantity.name

    def __str__(self) -> str:
        quantity, index = self.quantity, self.quantity.steps.index(self.step)
        pairs = ((f"{quantity.a[index]:.{digits}g}", f"{quantity.b[index]:.{digits}g}") for digits in range(6, 18))
        a, b = next(pair for pair in pairs if pair[0] != pair[1])  # as many digits as distinguish them: 17 always do
        return (
            f"step {self.step}, {self.name}: {a} and {b}, relative difference {quantity.differences[index]:.1e} "
            f"(tolerance {quantity.rtol:.0e})"
        )


@dataclass(frozen=True)
class Comparison:
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
    key_changes: tuple[str, ...]
    """Changes of keys at a later start of a run, as lines."""
    unrecorded: tuple[str, ...]
    """Runs that have not recorded their environment."""
    quantities: tuple[Quantity, ...]
    """Quantities in the order of their kinds, the main term first."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that both runs have."""
        return self.quantities[0].steps

    @property
    def divergence(self) -> FirstDivergence | None:
        """First divergence by step, then in the order of the quantities; None if the runs are equal."""
        first: FirstDivergence | None = None
        for quantity in self.quantities:
            step = quantity.first_step_beyond(quantity.rtol)
            if step is not None and (first is None or step < first.step):
                first = FirstDivergence(step, quantity)
        return first


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
        raise ConfigError(f"--rtol must be a finite number of at least 0, but is {rtol}; give one such as 1e-5")
    curves = [load_curves(run) for run in (run_a, run_b)]
    of_a, of_b = ({record.step: record for record in curve.steps} for curve in curves)
    shared = sorted(of_a.keys() & of_b.keys())
    if not shared:
        raise DataError(
            f"{run_a} and {run_b} have no step in common ({_span(of_a)} and {_span(of_b)}); compare runs "
            "whose steps overlap"
        )
    names = name_a, name_b = distinct_names([run_a, run_b])
    environments = [RunFolder(run).saved_environment() for run in (run_a, run_b)]
    texts = []
    for run in (run_a, run_b):
        if (text := RunFolder(run).saved_config()) is None:
            raise DataError(f"{run}/config.yaml does not exist; give the run.dir of a run")
        texts.append(text)
    configs, config_changes = [flat_keys(text) for text in texts], changes(*texts)
    tolerances = allowed(rtol, [config.get("train.precision") for config in configs])
    return Comparison(
        names=(name_a, name_b),
        num_steps=(len(of_a), len(of_b)),
        allowed=tolerances,
        expected=expected_difference(configs, config_changes, environments),
        changes=tuple(config_changes),
        environment=tuple(_environment_changes(*environments)),
        key_changes=tuple(
            f"{name} after step {change.step}: {change}"
            for name, curve in zip(names, curves, strict=True)
            for change in curve.changes
        ),
        unrecorded=tuple(name for name, environment in zip(names, environments, strict=True) if environment is None),
        tokens=(_tokens([of_a[step] for step in shared]), _tokens([of_b[step] for step in shared])),
        quantities=tuple(_quantities([(of_a[step], of_b[step]) for step in shared], tolerances)),
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
        return f"{text:,} (padding not counted separately), {pace}"
    padding, loss = (sum(getattr(record, name) for record in known) for name in ("padding_tokens", "loss_tokens"))
    return f"{text:,} of text, {loss:,} of them in the loss, and {padding:,} of padding; {pace}"


def _span(records: Mapping[int, StepRecord]) -> str:
    return f"steps {min(records)} to {max(records)}" if records else "no steps"


def _environment_changes(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> list[Change]:
    if a is None or b is None:
        return []
    return [
        Change(key, a.get(key), b.get(key), True) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
    ]


def _quantities(pairs: list[tuple[StepRecord, StepRecord]], allowed: Allowed) -> list[Quantity]:
    side_terms = sorted({term for pair in pairs for record in pair for term in record.terms} - {MAIN_TERM})
    steps = tuple(a.step for a, _ in pairs)

    def quantity(kind: Kind, name: str, rtol: float, term: str = "") -> Quantity:
        a, b = (tuple(_value(record, kind, term) for record in records) for records in zip(*pairs))
        return Quantity(kind, name, steps, a, b, rtol)

    return [
        quantity("denominator", "denominator", DENOMINATOR_RTOL),
        *(quantity("denominator", f"denominator of {term}", DENOMINATOR_RTOL, term) for term in side_terms),
        quantity("loss", "loss", allowed.loss),
        *(quantity("loss", f"loss of {term}", allowed.loss, term) for term in side_terms),
        quantity("grad_norm", "gradient norm", allowed.grad_norm),
        quantity("lr", "learning rate", allowed.lr),
    ]


def _value(record: StepRecord, kind: Kind, term: str) -> float:
    """Returns a record's number; nan for a missing term and for the loss of a step without loss tokens."""
    match kind:
        case "denominator" | "loss" if term:
            shown = record.terms.get(term)
            if shown is None:
                return math.nan
            return shown.denominator if kind == "denominator" else shown.loss
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
