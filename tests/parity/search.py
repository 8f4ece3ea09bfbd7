"""Run of the property search, and its comparison with the oracle.

A trial has only small numbers, so that hypothesis can shrink it and a failing one can be pasted into a regression test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.core.batch.sample import Sample
from tests.parity import balance_ranks
from tests.parity.batches import GlobalBatch
from tests.parity.cases import Case
from tests.parity.compare import TOLERANCE, Deviation, initial_parameters, relative, run_case, tensor_deviation, worst
from tests.parity.ranks import Arrays, StepOutcome
from tests.pool import Pool
from tests.reference import StepResult, doubles, exact_steps, forward_of, rows_of

ROOTS = ("seq-mean-token-sqrt", "seq-mean-token-power")
"""Aggregations whose denominators are not whole numbers, whatever is counted."""
MARGIN = 2e-5
"""Distance that every token must keep from another choice, in standard deviations of the ranked scores; float32 is
wrong by some 1e-6 of one."""

OF_SCORES = re.compile(r"(.*)\.(q_layernorm|k_layernorm|linear_q_(up_|down_|)proj|router)\.")
"""Pattern of parameters that only act through scores, of attention or of a router, and their module."""
SCORE_ROUNDINGS = 8
"""Error of a gradient of scores that is a difference of equal numbers, in roundings of the largest gradient of the
module. Where a token sees itself alone, or where a norm cancels the only expert's score, the true gradient is 0, but
float32 computes it as p (dp - sum p dp) from rounded numbers."""
WEIGHT_ROUNDINGS = 8
"""Factor by which a float32 run may deviate more than the rounding of its initial weights to float32 alone: every layer
also rounds its activations a few times in either direction."""

Place = Literal["spread", "start", "end"]


@dataclass(frozen=True)
class Row:
    """One sample: number, place and weights of its loss tokens."""

    loss_tokens: int = 0
    """Number of loss tokens, at most the row's length; tokens before a document's edge lose theirs."""
    place: Place = "spread"
    is_fractional: bool = False
    """Whether its tokens have weights such as 0.3 instead of 1."""
    weight: float = 1.0
    """Weight of the sample."""
    edges: tuple[int, ...] = ()
    """Positions at which documents begin, besides 0; only used where documents are isolated."""
    padding: int = 0
    """Number of positions at the end without text and loss; at least one position has text."""


@dataclass(frozen=True)
class Trial:
    """Run to be compared with the oracle."""

    case: Case
    steps: tuple[tuple[Row, ...], ...]
    """Rows of each global batch, by slot."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the parity tests' base configuration, as `model__num_layers`."""
    seed: int = 0
    """Seed of tokens, of the places of spread loss tokens, and of fractional weights."""

    def settings(self) -> dict[str, Any]:
        """Returns all changes of the base configuration, including the batch size."""
        return {**self.changes, "train__global_batch_size": len(self.steps[0])}

    def config(self) -> Config:
        """Returns the configuration of the run."""
        return self.case.config(**self.settings())

    def batches(self) -> list[GlobalBatch]:
        """Draws the samples of each step."""
        config, rng = self.config(), np.random.default_rng(self.seed)
        return [[sample(row, config, rng) for row in rows] for rows in self.steps]


def sample(row: Row, config: Config, rng: np.random.Generator) -> Sample:
    """Draws random tokens under the row's mask."""
    seq, isolated = config.data.seq_length, config.data.isolate_documents
    text = max(1, seq - row.padding)
    tokens = rng.integers(0, config.model.vocab_size, seq + 1)[: text + 1]
    mask = places(row, seq, rng)
    starts = np.zeros(text, np.int32)
    if row.is_fractional:
        mask *= rng.choice([1.0, 0.5, 0.125, 0.3], seq)
    mask = mask[:text]
    if isolated:
        edges = [edge for edge in row.edges if edge < text]
        starts[edges] = edges
        mask[[edge - 1 for edge in edges]] = 0.0  # no token is predicted across an edge
    return Sample(
        tokens=tokens[:-1],
        labels=np.where(mask > 0, tokens[1:], 0),
        mask=mask,
        weight=row.weight,
        document_starts=np.maximum.accumulate(starts) if isolated else None,
    )


def places(row: Row, seq: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draws a mask [seq] with ones where the row has loss tokens."""
    mask = np.zeros(seq)
    order = {"spread": rng.permutation(seq), "start": np.arange(seq), "end": np.arange(seq)[::-1]}
    mask[order[row.place][: row.loss_tokens]] = 1.0
    return mask


class Verdict(NamedTuple):
    """Comparison of a trial with the oracle."""

    deviation: Deviation
    wrong_sums: list[str]
    """Wrong denominators and counts of routers, one line each; empty where all are right."""
    tolerance: float
    """Largest deviation allowed: TOLERANCE, or more where float32 cannot be so accurate."""

    def assert_holds(self) -> None:
        """Raises AssertionError where the trial differs from the oracle."""
        assert not self.wrong_sums
        self.deviation.assert_below(self.tolerance)


class TieError(Exception):
    """A token is so near another expert that float32 may choose otherwise: nothing can be compared."""


def judge(pool: Pool, trial: Trial) -> Verdict:
    """Runs a trial on its ranks and in one float64 process.

    Raises:
        TieError: A choice is too near another one.
    """
    config, batches = trial.config(), trial.batches()
    exact = steps_from(config, batches)
    if min(step.margin for step in exact) < MARGIN:
        raise TieError
    outcome = run_case(pool, trial.case, batches, **trial.settings())
    found = deviation(outcome.steps, outcome.parameters, exact, config)
    wrong = [line for pair in zip(outcome.steps, exact, strict=True) for line in wrong_denominators(*pair, trial)]
    tolerance = TOLERANCE
    if max(found) > tolerance:
        tolerance = max(tolerance, WEIGHT_ROUNDINGS * sensitivity(config, batches, exact))
    return Verdict(found, wrong + wrong_counts(pool, trial, config, batches[0]), tolerance)


def deviation(
    steps: list[StepOutcome], parameters: Arrays | None, exact: list[StepResult], config: Config
) -> Deviation:
    """Measures how far the steps and the resulting weights are from the oracle's."""
    pairs = list(zip(steps, exact, strict=True))
    return Deviation(
        loss=max(relative(step.loss, own.loss) for step, own in pairs),
        grad_norm=max(relative(step.grad_norm, own.grad_norm) for step, own in pairs),
        gradient=max(worst_gradient(step.gradients, numpy(own.gradients), config) for step, own in pairs),
        weights=worst(parameters, numpy(exact[-1].parameters), config),
    )


def sensitivity(config: Config, batches: list[GlobalBatch], exact: list[StepResult]) -> float:
    """Measures the largest deviation of the oracle from itself when its initial weights are rounded to float32."""
    rounded = {name: value.astype(np.float32) for name, value in initial_parameters(config).items()}
    moved = steps_from(config, batches, rounded)
    steps = [StepOutcome(each.loss, {}, each.grad_norm, numpy(each.gradients)) for each in moved]
    return max(deviation(steps, numpy(moved[-1].parameters), exact, config))


def numpy(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Converts the tensors to arrays."""
    return {name: value.numpy() for name, value in tensors.items()}


def worst_gradient(found: Arrays | None, exact: Arrays, config: Config) -> float:
    """Computes `worst`, but gradients of scores may be as wrong as rounding in their module makes them."""
    assert found is not None
    of_scores = {name: match.group(1) for name in exact if (match := OF_SCORES.match(name))}
    others = [name for name in exact if name not in of_scores]
    deviations = [worst(_only(found, others), _only(exact, others), config)]
    for name, module in of_scores.items():
        largest = max(np.abs(value).max() for other, value in exact.items() if other.startswith(f"{module}."))
        rounding = SCORE_ROUNDINGS * 2.0**-24 * float(largest)
        if np.abs(found[name] - exact[name]).max() > rounding:
            deviations.append(tensor_deviation(found[name], exact[name]))
    return max(deviations)


def _only(tensors: Arrays, names: Iterable[str]) -> Arrays:
    return {name: tensors[name] for name in names}


def steps_from(config: Config, batches: list[GlobalBatch], parameters: Arrays | None = None) -> list[StepResult]:
    """Runs the same steps in one process in float64, from other parameters where they are given."""
    initial = initial_parameters(config) if parameters is None else parameters
    rates = [learning_rate(step, config.optimizer, config.train.num_steps) for step in range(len(batches))]
    return exact_steps(config, initial, rates, batches)


def wrong_denominators(found: StepOutcome, exact: StepResult, trial: Trial) -> list[str]:
    """Compares denominators: sums of whole numbers exactly, others to the rounding of as many float64 additions."""
    assert found.terms.keys() == exact.denominators.keys()
    rows = [row for rows in trial.steps for row in rows]
    tokens = len(rows) * trial.config().data.seq_length
    is_whole = all(row.weight.is_integer() and not row.is_fractional for row in rows)
    terms = {"main": trial.config().loss, **trial.config().loss.side_terms}
    lines = []
    for name, expected in exact.denominators.items():
        is_count = name.startswith("router_")
        # depths are aggregated as the main term
        is_count |= is_whole and terms.get(name, terms["main"]).aggregation not in ROOTS
        bound = 0.0 if is_count else tokens * 2.0**-53 * expected
        if abs(found.terms[name].denominator - expected) > bound:
            lines.append(f"{name}: {found.terms[name].denominator!r} instead of {expected!r}")
    return lines


def wrong_counts(pool: Pool, trial: Trial, config: Config, batch: GlobalBatch) -> list[str]:
    """Compares the tokens of text that each expert gets, of all ranks; empty where no router counts."""
    section = config.model.experts
    if section is None or not (section.bias_update_rate or config.loss.router.coefficients):
        return []
    parameters = initial_parameters(config)
    seen = forward_of(doubles(parameters), config.model, rows_of(batch)).seen
    everyone = pool.run(balance_ranks.counts, trial.case.resolved(config), config, parameters, batch)
    lines = []
    for router in (router for router in seen if router.name.startswith("decoder.")):
        expected = router.chosen[router.is_text].sum(0).tolist()
        found = np.sum([own[router.name] for own in everyone if router.name in own], axis=0).tolist()
        if found != expected:
            lines.append(f"{router.name}: {found} instead of {expected}")
    return lines
