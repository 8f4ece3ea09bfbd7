"""Runs a case, runs the oracle, and says how far apart they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.plan.lr import learning_rate
from tests.oracle.loss import Sequence, Teacher
from tests.oracle.model import random_parameters
from tests.oracle.run import StepResult, oracle_steps
from tests.parity.batches import GlobalBatch
from tests.parity.cases import Case
from tests.parity.ranks import Arrays, Outcome, StepOutcome, train
from tests.pool import Pool

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
        """Raises AssertionError where one is too large."""
        assert max(self) <= tolerance, f"{self} is not within {tolerance}"


TEACHER_SEED = 5
"""Of a teacher's parameters; the run's have another."""


def initial_parameters(config: Config, seed: int = 3) -> Arrays:
    """Every parameter drawn, norms and biases too, so that no gradient is 0 by accident.

    Matrices have standard deviation 0.1: at the oracle's 0.2 the sharp attention of an untrained model amplifies the
    rounding of the first two updates by 30 in the third gradient, with one process as with eight.
    """
    drawn = random_parameters(config.model, seed)
    return {name: (0.5 * value if value.ndim > 1 else value).numpy() for name, value in drawn.items()}


def run_case(pool: Pool, case: Case, batches: list[GlobalBatch], **changes: Any) -> Outcome:
    """Trains on the case's ranks, which must all report the same; rank 0's outcome."""
    config = case.config(**changes)
    everyone = pool.run(train, case.resolved(config), config, initial_parameters(config), batches)
    reports = [[step._replace(gradients=None) for step in outcome.steps] for outcome in everyone]
    assert all(report == reports[0] for report in reports)
    outcome: Outcome = everyone[0]
    return outcome


def run_oracle(config: Config, batches: list[GlobalBatch], teacher: Config | None = None) -> list[StepResult]:
    """The same steps by one process in float64; kept for the session.

    Args:
        config: Of the run.
        batches: One a step.
        teacher: Whose model stands beside the run's, with parameters of TEACHER_SEED.
    """
    sections = (config.model, config.loss, config.optimizer, *([] if teacher is None else [teacher.model]))
    key = "".join([section.model_dump_json() for section in sections]) + str(_fingerprint(batches))
    if key not in _oracles:
        _oracles[key] = oracle_steps(
            _tensors(initial_parameters(config)),
            config.model,
            config.loss,
            config.optimizer,
            [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(len(batches))],
            [[Sequence.of_sample(sample, config.model.experts is not None) for sample in batch] for batch in batches],
            None if teacher is None else Teacher(_tensors(initial_parameters(teacher, TEACHER_SEED)), teacher.model),
        )
    return _oracles[key]


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in arrays.items()}


def _fingerprint(batches: list[GlobalBatch]) -> int:
    return hash(
        tuple((s.tokens.tobytes(), s.mask.tobytes(), s.weight, str(s.document_starts)) for b in batches for s in b)
    )


def deviation(outcome: Outcome, oracle: list[StepResult], config: Config) -> Deviation:
    """How far a run is from the oracle's; denominators must be equal outright."""
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
    """Counts are equal; sums of fractional weights to the rounding of float64."""
    assert found.terms.keys() == exact.denominators.keys()
    for term, expected in exact.denominators.items():
        denominator = found.terms[term].denominator
        tolerance = 0.0 if expected.is_integer() else 1e-14
        assert abs(denominator - expected) <= tolerance * expected, (term, denominator, expected)


def between(one: Outcome, other: Outcome, config: Config) -> Deviation:
    """How far two runs are from each other."""
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
    """Tables cut to their real rows."""
    assert tensors is not None
    return {name: value[:vocab_size] if name in _TABLES else value for name, value in tensors.items()}


def worst(found: Arrays | None, exact: Arrays, config: Config) -> float:
    """The largest relative deviation of a tensor; rows of the padded vocabulary must be exactly 0."""
    assert found is not None
    assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
    for name in found.keys() & set(_TABLES):
        assert not found[name][config.model.vocab_size :].any(), f"{name} has padding that is not 0"
    real = without_padding(found, config.model.vocab_size)
    return max(tensor_deviation(real[name], exact[name]) for name in exact)


def tensor_deviation(found: NDArray[Any], exact: NDArray[Any]) -> float:
    """Largest difference / largest element of the reference; inf where the reference is 0 and the other is not."""
    assert found.shape == exact.shape
    difference = float(np.abs(found.astype(np.float64) - exact).max())
    return difference / float(np.abs(exact).max()) if exact.any() else (0.0 if difference == 0 else float("inf"))


def relative(found: float, exact: float) -> float:
    """Difference / reference; inf where the reference is 0 and the other is not."""
    return abs(found - exact) / abs(exact) if exact != 0 else (0.0 if found == 0 else float("inf"))
