"""Comparison of a layout's samples, learning rates, denominators, terms, gradients, norms and new weights.

Packed rows are split into samples first; each is compared with the raw sample as if it were alone in a row.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.loss import TermSection
from mtrain.core.batch.batch import Microbatch
from mtrain.verify.core.exact import Exact
from mtrain.verify.core.layouts import Prepared
from mtrain.verify.core.result import Deviation, StepValues, Tolerance
from mtrain.verify.core.tolerances import RATE_TOLERANCE, UNIT_ROUNDOFF, rounding_limit, update_tolerance
from mtrain.verify.core.weights import TABLES, Arrays, Whole
from mtrain.verify.core.worker import Outcome, StepOutcome, disagreement
from mtrain.verify.reference.aggregation import token_weights
from mtrain.verify.reference.model.adapters import is_trained
from mtrain.verify.reference.model.images import scaled_like
from mtrain.verify.reference.optimizer import Moments, Updated, exact_optimizer
from mtrain.verify.reference.schedule import published_rate
from mtrain.verify.reference.text import Rows, Text, rows_of

_SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest normal float32 number; keeps 0 / 0 out of the comparison of weights."""
_IDS, _EXTRA, _EXPERTS = "sequence ids", "extra ", "routed experts"

Fields = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Expected:
    """Expectations that all layouts share; exact values depend on each layout's weights."""

    tolerances: Sequence[Tolerance]
    tensors: Sequence[str]
    """Names of tensors in the order of the forward pass."""
    fields: Sequence[Fields]
    """Rows to train on, by step."""
    order_faults: Sequence[str]


def compared(
    trial: Prepared, outcomes: Sequence[Outcome], exact: Sequence[Exact], expected: Expected
) -> dict[str, Any]:
    """Returns the fields of a layout's `LayoutResult`; `exact` has the exact values at the layout's own weights."""
    first, config = outcomes[0], trial.config
    guards = [f"step {step.values.step}: {step.guard}" for step in first.steps if step.guard is not None]
    guards += expected.order_faults
    comparison = StepComparison(config, expected.tolerances, expected.tensors, lambda step: config.optimizer.lr)
    inputs = [*_inputs(outcomes, expected), *rate_deviations(first.rates, config)]
    if disagreeing := disagreement(outcomes):
        guards.append(disagreeing)
    return {
        "steps": tuple(step.values for step in first.steps),
        "expected": tuple(exact_step.values for exact_step in exact),
        "deviations": (*inputs, *comparison.of(first, exact)),
        "guards": tuple(guards),
    }


def _inputs(outcomes: Sequence[Outcome], expected: Expected) -> Iterator[Deviation]:
    readers = [outcome.batches for outcome in outcomes if outcome.batches]
    for number, fields in enumerate(expected.fields[: len(readers[0])]):
        batches = [batch for steps in readers for batch in steps[number]]
        yield from sample_deviations(number + 1, batches, fields)


class StepComparison:
    """Compares steps with exact values, quantity by quantity in the order in which a step computes them."""

    def __init__(
        self,
        config: Config,
        tolerances: Sequence[Tolerance],
        tensors: Sequence[str],
        rate: Callable[[int], float],
        start: Moments = Moments(0, {}, {}),  # noqa: B008
    ) -> None:
        """Begins with the exact optimizer in state `start`; `rate` gives the learning rate of a step, from 1."""
        self._config, self._tensors, self._rate = config, tensors, rate
        self._tolerance = {tolerance.kind: tolerance.value for tolerance in tolerances}
        self._optimizer = exact_optimizer(config, start)

    def of(self, outcome: Outcome, exact: Sequence[Exact]) -> Iterator[Deviation]:
        """Yields the deviations, step by step."""
        assert outcome.initial is not None, "rank 0 holds the gathered weights"
        before = outcome.initial.tensors
        for step, expected in zip(outcome.steps, exact):
            assert step.gradients is not None, "rank 0 holds the gathered tensors"
            assert step.weights is not None, "rank 0 holds the gathered tensors"
            for term, value in expected.values.denominators.items():
                tolerance = 0.0 if term in expected.adds_exactly else self._tolerance["denominator"]
                deviation = relative(step.values.denominators[term], value)
                yield Deviation("denominator", term, step.values.step, deviation, tolerance)
            judged = list(self._judged(step, expected))
            yield from judged
            yield self._norm(step.values, step.gradients, expected)
            updated = self._updated(before, step.gradients.tensors, step.values, expected.biases)
            yield from self._weights(step.values.step, step.weights, updated)
            if step.in_float64 is not None:
                yield from self._rounding(step, expected, judged)
            before = step.weights.tensors

    def _judged(self, outcome: StepOutcome, expected: Exact) -> Iterator[Deviation]:
        """Compares losses and gradients, the float64 ones if the layout has them."""
        step, means, gradients = outcome.values.step, outcome.values.means, outcome.gradients
        if outcome.in_float64 is not None:
            means, gradients = outcome.in_float64.means, outcome.in_float64.gradients
        assert gradients is not None, "rank 0 holds the gathered tensors"
        yield from self._losses("loss", step, means, expected)
        yield from self._gradients("gradient", step, gradients, expected)

    def _rounding(self, outcome: StepOutcome, expected: Exact, judged: Sequence[Deviation]) -> Iterator[Deviation]:
        """Compares the float32 losses and gradients of a layout that is judged in float64."""
        assert outcome.gradients is not None, "rank 0 holds the gathered tensors"
        amplified = max((deviation.value for deviation in judged if deviation.kind == "gradient"), default=0.0)
        limit = rounding_limit(self._tolerance["rounding"], amplified)
        for deviation in self._losses("rounding", outcome.values.step, outcome.values.means, expected):
            yield replace(deviation, name=f"loss {deviation.name}", tolerance=limit)
        for deviation in self._gradients("rounding", outcome.values.step, outcome.gradients, expected):
            yield replace(deviation, tolerance=limit)

    def _losses(self, kind: str, step: int, means: Mapping[str, float], expected: Exact) -> Iterator[Deviation]:
        for term, value in expected.values.means.items():
            yield Deviation(kind, term, step, relative(means[term], value), self._tolerance[kind])

    def _gradients(self, kind: str, step: int, gradients: Whole, expected: Exact) -> Iterator[Deviation]:
        """Compares gradients from the loss backwards, in the order of computation."""
        exact = expected.gradients
        for name in reversed([name for name in self._tensors if name in exact]):
            error = self._relative_error(name, gradients, exact[name], exact[scaled_like(name)])
            yield Deviation(kind, name, step, error, self._tolerance[kind])

    def _relative_error(self, name: str, gradients: Whole, exact: NDArray[Any], scale: NDArray[Any]) -> float:
        """Returns the larger of error and difference between ranks, relative to the largest element of `scale`."""
        actual, padding = self._parts(name, gradients.tensors[name])
        exact, scale = (self._parts(name, each)[0] for each in (exact, scale))
        if padding.any():
            return math.inf
        difference = max(float(np.abs(actual - exact).max()), gradients.spread[name])
        largest = float(np.abs(scale).max())
        if largest > 0:
            return difference / largest
        return 0.0 if difference == 0 else math.inf

    def _norm(self, values: StepValues, gradients: Whole, expected: Exact) -> Deviation:
        tensors = (self._parts(name, gradients.tensors[name])[0].astype(np.float64) for name in expected.gradients)
        deviation = relative(values.grad_norm, math.sqrt(math.fsum(float((tensor**2).sum()) for tensor in tensors)))
        return Deviation("grad_norm", "grad_norm", values.step, deviation, self._tolerance["grad_norm"])

    def _updated(self, before: Arrays, gradients: Arrays, values: StepValues, biases: Arrays) -> Updated:
        """Applies the exact optimizer to the layout's gradients, and adds exact biases; no-op in an empty step."""
        scales = {name: np.abs(value) + 1e-30 for name, value in before.items()}
        if values.denominators["main"] == 0:
            return Updated(before, scales)
        updated = self._optimizer.updated(before, gradients, values.grad_norm, self._rate(values.step))
        moved = {name: np.abs(value) + np.abs(value - before[name]) for name, value in biases.items()}
        return Updated({**before, **updated.weights, **biases}, {**scales, **updated.scales, **moved})

    def _weights(self, step: int, weights: Whole, exact: Updated) -> Iterator[Deviation]:
        for name in self._tensors:
            actual, padding = self._parts(name, weights.tensors[name])
            expected, scale = (self._parts(name, tensors[name])[0] for tensors in (exact.weights, exact.scales))
            scale = np.maximum(scale, _SMALLEST)
            excess = np.abs(actual - expected) / scale
            spread = weights.spread[name] / float(scale.max())
            value = math.inf if padding.any() else max(float(excess.max()), spread)
            # frozen tensors keep their bits
            learns = is_trained(name, self._config.adapter, self._config.model.vision)
            tolerance = update_tolerance(step) if learns else 0.0
            yield Deviation("update", name, step, value, tolerance)

    def _parts(self, name: str, values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Splits a tensor into its real rows and its vocabulary padding, which must be exactly 0."""
        size = self._config.model.vocab_size
        return (values[:size], values[size:]) if name in TABLES else (values, values[:0])


def relative(value: float, exact: float) -> float:
    """Returns the error relative to `exact`; inf if only `exact` is 0 or `value` is not finite."""
    if exact == 0 or not math.isfinite(value):
        return 0.0 if value == exact else math.inf
    return abs(value - exact) / abs(exact)


def rate_deviations(rates: Mapping[int, float], config: Config) -> Iterator[Deviation]:
    """Yields deviations of learning rates, relative to the highest rate."""
    for number, rate in rates.items():
        exact = published_rate(number, config.optimizer, config.train.num_steps)
        yield Deviation("lr", "lr", number + 1, abs(rate - exact) / config.optimizer.lr, RATE_TOLERANCE)


def expected_fields(texts: Sequence[Text], config: Config) -> Fields:
    """Returns the rows of a global batch by slot, made from the raw samples."""
    rows = rows_of(texts, config.data.seq_length, config.model.vocab_size, torch.device("cpu"))
    indices = torch.arange(rows.tokens.shape[1])
    fields = {
        "tokens": rows.tokens,
        "labels": rows.labels,
        "positions": torch.where(rows.is_text, rows.positions, 0),
        "documents": torch.where(rows.is_text, indices - rows.positions, 0),
        "padding": ~rows.is_text,
        **{f"weights of {name}": weights for name, weights in _weights_by_term(rows, config).items()},
        **{f"{_EXTRA}{name}": values for name, values in rows.extras.items()},
        **({} if rows.routed_experts is None else {_EXPERTS: rows.routed_experts}),
    }
    return {name: field.numpy() for name, field in fields.items()}


def _weights_by_term(rows: Rows, config: Config) -> dict[str, torch.Tensor]:
    sections: dict[str, TermSection] = {"main": config.loss, **config.loss.side_terms}
    weights = {name: token_weights(rows.weights, rows.sample_weights, term) for name, term in sections.items()}
    for depth in range(1, config.model.num_predictions):
        weights[f"mtp_{depth}"] = token_weights(rows.ahead(depth).weights, rows.sample_weights, config.loss)
    return weights


def sample_deviations(step: int, batches: Sequence[Microbatch], expected: Fields) -> Iterator[Deviation]:
    """Yields, for each field, the share of samples that differ from `expected_fields`.

    `batches` has the microbatches of all ranks, with samples in any rows; `step` counts from 1.
    """
    length = expected["tokens"].shape[1]
    samples = [sample for batch in batches for row in _rows(batch) for sample in _samples(row, batch, length)]
    pairs = _paired(samples, expected["tokens"])
    size = len(expected["tokens"])
    yield Deviation("samples", "tokens", step, (max(size, len(samples)) - len(pairs)) / size, 0.0)
    for name, values in expected.items():
        if name != "tokens":
            differing = sum(not _equals(name, samples[index], values[slot], expected, slot) for index, slot in pairs)
            yield Deviation("samples", name, step, differing / size, 0.0)


def _rows(batch: Microbatch) -> Iterator[Fields]:
    starts = torch.zeros_like(batch.tokens) if batch.document_starts is None else batch.document_starts
    experts = batch.choices.get(ROUTED_EXPERTS)
    for row in range(len(batch.tokens)):
        padding = {} if batch.is_padding is None else {"padding": batch.is_padding[row].numpy()}
        yield {
            "tokens": batch.tokens[row].numpy(),
            "labels": batch.labels[row].numpy(),
            "positions": batch.positions[row].numpy(),
            "documents": starts[row].numpy(),
            **padding,
            **{f"weights of {term}": weights[row].numpy() for term, weights in batch.weights.items()},
            **{f"{_EXTRA}{name}": values[row].numpy() for name, values in batch.extras.items()},
            **({} if experts is None else {_EXPERTS: experts[row].numpy()}),
            **({} if batch.sequence_ids is None else {_IDS: batch.sequence_ids[row].numpy()}),
        }


def _samples(row: Fields, batch: Microbatch, length: int) -> Iterator[Fields]:
    """Yields the samples of a row, each as if alone in a row of this length; skips empty ones."""
    if batch.sequence_ids is None:
        yield row
        return
    edges = [0, *(np.flatnonzero(np.diff(row[_IDS])) + 1), len(row[_IDS])]
    for start, end in itertools.pairwise(edges):
        alone = {name: values[start:end] for name, values in row.items() if name != _IDS}
        alone["documents"] = alone["documents"] - start
        if any(alone[name].any() for name in ("tokens", "labels", "weights of main")):
            yield {name: _resized(values, length, fill=name == "padding") for name, values in alone.items()}


def _resized(values: NDArray[Any], length: int, fill: bool) -> NDArray[Any]:
    """Pads or cuts values to `length`; a correct sample loses only padding."""
    filler = np.full((max(0, length - len(values)), *values.shape[1:]), fill, values.dtype)
    return np.concatenate([values[:length], filler])


def _paired(samples: Sequence[Fields], tokens: NDArray[Any]) -> list[tuple[int, int]]:
    slots: dict[bytes, list[int]] = defaultdict(list)
    for slot in reversed(range(len(tokens))):
        slots[tokens[slot].tobytes()].append(slot)
    pairs = []
    for number, row in enumerate(samples):
        if slots[row["tokens"].tobytes()]:
            pairs.append((number, slots[row["tokens"].tobytes()].pop()))
    return pairs


def _equals(name: str, row: Fields, exact: NDArray[Any], expected: Fields, slot: int) -> bool:
    """Compares a field where it matters: labels and extras at loss tokens, positions and documents at text."""
    if name not in row:
        return name == "padding"  # not needed by this configuration
    actual, is_text = row[name], ~expected["padding"][slot]
    if name.startswith("weights of "):
        return bool(np.all(np.abs(actual - exact) <= 2 * UNIT_ROUNDOFF * np.abs(exact)))
    if name == "labels" or name.startswith(_EXTRA):
        counts = expected["weights of main"][slot] > 0
        return bool(np.array_equal(actual[counts], exact[counts]))
    if name == "padding":
        return bool(np.array_equal(actual, exact))
    return bool(np.array_equal(actual[is_text], exact[is_text]))
