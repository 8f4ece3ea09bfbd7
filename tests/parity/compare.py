"""Runs a case and the oracle, which is the reference of tests/reference.py, and measures their difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from mtrain.arch.layout import Layout
from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.sample import Sample
from mtrain.verify.reference.model.transformer import Transformer
from tests.parity.batches import GlobalBatch
from tests.parity.cases import Case
from tests.parity.ranks import Arrays, Outcome, Run, StepOutcome, train, train_each
from tests.pool import Pool
from tests.reference import StepResult, doubles, exact_steps, random_parameters

TOLERANCE = 1e-5
"""Largest relative deviation allowed in float32."""

_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
_oracles: dict[str, list[StepResult]] = {}


class Deviation(NamedTuple):
    """Relative deviations, the worst over all steps; of a tensor: largest difference / largest element of the
    reference."""

    loss: float
    grad_norm: float
    gradient: float
    weights: float

    def assert_below(self, tolerance: float = TOLERANCE) -> None:
        """Raises AssertionError where a deviation is too large."""
        assert max(self) <= tolerance, f"{self} is not within {tolerance}"


TEACHER_SEED = 5
"""Seed of a teacher's parameters; the run's have another."""


def initial_parameters(config: Config, seed: int = 3) -> Arrays:
    """Draws every parameter, norms and biases too, so that no gradient is 0 by accident.

    Matrices have standard deviation 0.1: at the oracle's 0.2 the sharp attention of an untrained model amplifies the
    rounding of the first two updates by 30 in the third gradient, with one process as with eight.
    """
    drawn = random_parameters(config.model, seed)
    return {name: (0.5 * value if value.ndim > 1 else value).numpy() for name, value in drawn.items()}


class Row(NamedTuple):
    """Run under a layout, which has to equal the oracle."""

    name: str
    changes: dict[str, Any]
    case: Case
    batches: list[GlobalBatch]

    def __str__(self) -> str:
        return f"{self.name}-{self.case.resolved(self.config)}-mbs{self.case.micro_batch_size}"

    @property
    def config(self) -> Config:
        """Returns the configuration of the run."""
        return self.case.config(**self.changes)


def rows_by_layout(rows: Iterable[Row]) -> dict[Layout, list[Row]]:
    """Groups the rows by layout; those of one layout share one launch of ranks."""
    found: dict[Layout, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case.resolved(row.config), []).append(row)
    return found


def by_layout(rows: Iterable[Row], night: Iterable[Row] = ()) -> list[Any]:
    """Makes the parameters of a test, the rows of each layout; those of `night` wait for the night."""
    by_day = [pytest.param(of_layout, id=str(layout)) for layout, of_layout in rows_by_layout(rows).items()]
    by_night = rows_by_layout(night).items()
    return by_day + [pytest.param(each, id=f"{of} at night", marks=pytest.mark.nightly) for of, each in by_night]


def at_night(*values: object) -> Any:
    """Makes a row of a test that waits for the night."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def assert_rows_exact(pool: Pool, rows: Sequence[Row]) -> list[list[StepResult]]:
    """Checks that every row of a layout equals the oracle within TOLERANCE; returns the oracle's steps of each.

    Raises:
        AssertionError: Some rows differ; the message names them.
    """
    found = zip(rows, deviations(pool, rows), strict=True)
    wrong = [(str(row), each) for row, each in found if not max(each) <= TOLERANCE]
    assert wrong == [], f"not within {TOLERANCE}"
    return [run_oracle(row.config, row.batches) for row in rows]


def deviations(pool: Pool, rows: Sequence[Row]) -> list[Deviation]:
    """Measures the deviation of each row of one layout from the oracle; one launch of ranks trains them all."""
    (layout,) = {row.case.resolved(row.config) for row in rows}
    runs = [Run(row.config, initial_parameters(row.config), row.batches) for row in rows]
    by_rank = pool.run(train_each, layout, runs)
    return [
        deviation(_agreed(everyone), run_oracle(row.config, row.batches), row.config)
        for row, everyone in zip(rows, zip(*by_rank, strict=True), strict=True)
    ]


def run_case(pool: Pool, case: Case, batches: list[GlobalBatch], **changes: Any) -> Outcome:
    """Trains on the case's ranks, which must all report the same; returns rank 0's outcome."""
    config = case.config(**changes)
    return _agreed(pool.run(train, case.resolved(config), config, initial_parameters(config), batches))


def _agreed(everyone: Sequence[Outcome]) -> Outcome:
    """Returns rank 0's outcome; all ranks must report the same steps."""
    reports = [[step._replace(gradients=None) for step in outcome.steps] for outcome in everyone]
    assert all(report == reports[0] for report in reports)
    return everyone[0]


def run_oracle(config: Config, batches: list[GlobalBatch], teacher: Config | None = None) -> list[StepResult]:
    """Runs the same steps in one process in float64; the result is cached for the session.

    Args:
        config: Configuration of the run.
        batches: Batches, one per step.
        teacher: Configuration of a teacher next to the run's model, with parameters of TEACHER_SEED; None without one.
    """
    sections = (config.model, config.loss, config.optimizer, *([] if teacher is None else [teacher.model]))
    key = "".join([section.model_dump_json() for section in sections]) + str(_fingerprint(batches))
    if key not in _oracles:
        frozen = None if teacher is None else doubles(initial_parameters(teacher, TEACHER_SEED))
        _oracles[key] = exact_steps(
            config,
            initial_parameters(config),
            [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(len(batches))],
            batches,
            None if teacher is None or frozen is None else Transformer(teacher.model, frozen),
        )
    return _oracles[key]


def _fingerprint(batches: list[GlobalBatch]) -> int:
    samples = [sample for batch in batches for sample in batch]
    return hash(
        tuple(
            (s.tokens.tobytes(), s.mask.tobytes(), s.weight, str(s.document_starts), str(s.extras), _routes(s))
            for s in samples
        )
    )


def _routes(sample: Sample) -> bytes:
    return b"".join(each.tobytes() for each in sample.choices.values())


def deviation(outcome: Outcome, oracle: list[StepResult], config: Config) -> Deviation:
    """Measures the deviation of a run from the oracle; denominators must be exactly equal."""
    pairs = list(zip(outcome.steps, oracle, strict=True))
    for found, exact in pairs:
        assert_denominators(found, exact)
    weights = {name: value.numpy() for name, value in oracle[-1].parameters.items()}
    return Deviation(
        loss=max(relative(found.loss, exact.loss) for found, exact in pairs),
        grad_norm=max(relative(found.grad_norm, exact.grad_norm) for found, exact in pairs),
        gradient=max(
            worst(found.gradients, {name: value.numpy() for name, value in exact.gradients.items()}, config)
            for found, exact in pairs
        ),
        weights=worst(outcome.parameters, weights, config),
    )


def assert_denominators(found: StepOutcome, exact: StepResult) -> None:
    """Checks that counts are equal, and sums of fractional weights equal to the rounding of float64."""
    assert found.terms.keys() == exact.denominators.keys()
    for term, expected in exact.denominators.items():
        denominator = found.terms[term].denominator
        # beyond 2^53 every float64 is whole, and none of them is a count
        tolerance = 0.0 if expected.is_integer() and expected < 2**53 else 1e-14
        assert abs(denominator - expected) <= tolerance * expected, (term, denominator, expected)


def between(one: Outcome, other: Outcome, config: Config) -> Deviation:
    """Measures the deviation between two runs."""
    pairs = list(zip(one.steps, other.steps, strict=True))
    assert all(
        {name: total.denominator for name, total in a.terms.items()}
        == {name: total.denominator for name, total in b.terms.items()}
        for a, b in pairs
    )
    size = config.model.vocab_size
    return Deviation(
        loss=max(relative(a.loss, b.loss) for a, b in pairs),
        grad_norm=max(relative(a.grad_norm, b.grad_norm) for a, b in pairs),
        gradient=max(worst(a.gradients, without_padding(b.gradients, size), config) for a, b in pairs),
        weights=worst(one.parameters, without_padding(other.parameters, size), config),
    )


def without_padding(tensors: Arrays | None, vocab_size: int) -> Arrays:
    """Cuts tables to their real rows."""
    assert tensors is not None
    return {name: value[:vocab_size] if name in _TABLES else value for name, value in tensors.items()}


def worst(found: Arrays | None, exact: Arrays, config: Config) -> float:
    """Returns the largest relative deviation of a tensor; rows of the padded vocabulary must be exactly 0."""
    assert found is not None
    assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
    for name in found.keys() & set(_TABLES):
        assert not found[name][config.model.vocab_size :].any(), f"{name} has padding that is not 0"
    real = without_padding(found, config.model.vocab_size)
    return max(tensor_deviation(real[name], exact[name]) for name in exact)


def tensor_deviation(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Returns largest difference / largest element of the reference; inf where only the reference is 0."""
    assert found.shape == exact.shape
    difference = float(np.abs(found.astype(np.float64) - exact).max())
    return difference / float(np.abs(exact).max()) if exact.any() else (0.0 if difference == 0 else float("inf"))


def relative(found: float, exact: float) -> float:
    """Returns difference / reference; inf where only the reference is 0."""
    return abs(found - exact) / abs(exact) if exact != 0 else (0.0 if found == 0 else float("inf"))
