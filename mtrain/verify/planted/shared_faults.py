"""How each fault of `shared_inject` is planted: one function or attribute is replaced while a run lasts.

Each is planted where all layouts pass: in the data, in the definition of a loss, in a module, in the optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.config.schema.loss import NORM_AGGREGATIONS, TermSection
from mtrain.config.schema.model import RopeSection
from mtrain.config.schema.train import OptimizerSection
from mtrain.data import collate, loader, order
from mtrain.data.batch import Microbatch
from mtrain.data.collate import RowForm
from mtrain.data.samples.mtp import mtp_sample
from mtrain.data.samples.sample import Sample
from mtrain.loss import aggregation
from mtrain.loss import router as losses
from mtrain.loss.vocab_parallel import chunks
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.engine import numerator_factors, optimizer
from mtrain.mcore.model import build, norm
from mtrain.mcore.model.attention import context_parallel
from mtrain.mcore.model.moe import balance, router
from mtrain.mcore.model.moe.topk_routing import choose
from mtrain.mcore.model.rotary.frequencies import inverse_frequencies
from mtrain.plan import lr
from mtrain.verify.planted.planting import Plant, replaced


def _samples(change: Callable[[Sample], Sample]) -> Plant:
    """Changes what the terms of a sample are made of."""
    original = collate._terms

    def faulty(sample: Sample, term: TermSection, is_first_in_step: bool) -> Any:
        return original(change(sample), term, is_first_in_step)

    return lambda: replaced(collate, "_terms", faulty)


def _without_last_tokens(sample: Sample) -> Sample:
    """Masks the last token that each document predicts."""
    size = len(sample.mask)
    starts = np.zeros(size, np.int32) if sample.document_starts is None else sample.document_starts
    mask = sample.mask.copy()
    for end in (*np.flatnonzero(np.diff(starts)), size - 1):
        counted = np.flatnonzero((starts == starts[end]) & (mask > 0))
        mask[counted[-1:]] = 0.0
    return replace(sample, mask=mask)


def _padding_counted() -> contextlib.AbstractContextManager[None]:
    original = collate.collate

    def faulty(rows: Any, form: RowForm, first_of_step: Any) -> Microbatch:
        batch = original(rows, replace(form, with_padding=True), first_of_step)
        assert batch.is_padding is not None, "it was asked for"
        weights, shares = (
            {term: each.masked_fill(batch.is_padding, 1.0) for term, each in of_terms.items()}
            for of_terms in (batch.weights, batch.denominator_weights)
        )
        known = batch.is_padding if form.with_padding else None
        return replace(batch, weights=weights, denominator_weights=shares, is_padding=known)

    return replaced(loader, "collate", faulty)


def _rows_as_sequences() -> contextlib.AbstractContextManager[None]:
    original = collate._aggregated

    def faulty(rows: Any, term: TermSection, first_of_step: collate.Place | None) -> Any:
        return original([[_joined(row)] if row else [] for row in rows], term, first_of_step)

    return replaced(collate, "_aggregated", faulty)


def _joined(row: Sequence[Any]) -> Any:
    """All samples of a row as one, their weights among those of its tokens."""
    mask = np.concatenate([piece.sample.mask * piece.sample.weight for piece in row])
    return replace(row[0], sample=replace(row[0].sample, mask=mask, weight=1.0))


def _labels_of_next() -> contextlib.AbstractContextManager[None]:
    original = collate.collate

    def faulty(rows: Sequence[Sequence[Sample]], form: RowForm, first_of_step: collate.Place | None) -> Microbatch:
        return original([_looking_over(row) for row in rows], form, first_of_step)

    return replaced(loader, "collate", faulty)


def _looking_over(row: Sequence[Sample]) -> list[Sample]:
    changed = list(row)
    for number, (sample, following) in enumerate(itertools.pairwise(row)):
        if len(sample.tokens) and len(following.tokens):
            labels, mask = sample.labels.copy(), sample.mask.copy()
            labels[-1], mask[-1] = following.tokens[0], 1.0
            changed[number] = replace(sample, labels=labels, mask=mask)
    return changed


def _balance_of_rows() -> contextlib.AbstractContextManager[None]:
    original = build._sequence_ids
    return replaced(build, "_sequence_ids", lambda batch: original(replace(batch, sequence_ids=None)))


def _batches(change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Plant:
    """Changes fields of every microbatch."""
    original = Microbatch
    return lambda: replaced(collate, "Microbatch", lambda **fields: original(**{**fields, **change(fields)}))


def _positions_of_rows(fields: Mapping[str, Any]) -> dict[str, Any]:
    positions = fields["positions"]
    return {"positions": torch.arange(positions.shape[1]).expand_as(positions).contiguous()}


def _divisor(aggregations: Sequence[str], change: Callable[[float, TermSection], float]) -> Plant:
    """Changes what the tokens of one sequence are divided by, in some aggregations."""
    original = aggregation._divisor

    def faulty(total: float, term: TermSection) -> float:
        return change(total, term) if term.aggregation in aggregations else original(total, term)

    return lambda: replaced(aggregation, "_divisor", faulty)


def _empty_sequences_confused() -> contextlib.AbstractContextManager[None]:
    original = aggregation._share
    other = {"include": "exclude", "exclude": "include"}

    def faulty(total: float, sample_weight: float, term: TermSection, is_first_in_step: bool) -> float:
        confused = term.model_copy(update={"empty_sequences": other[term.empty_sequences]})
        return original(total, sample_weight, confused, is_first_in_step)

    return replaced(aggregation, "_share", faulty)


def _looks_over_edges() -> contextlib.AbstractContextManager[None]:
    original = mtp_sample
    return replaced(collate, "mtp_sample", lambda row, starts, depth: original(row, np.zeros_like(starts), depth))


def _every_second_sample() -> contextlib.AbstractContextManager[None]:
    original = order.SampleOrder.locate
    return replaced(order.SampleOrder, "locate", lambda self, number: original(self, number - number % 2))


def _side_terms_by_main() -> contextlib.AbstractContextManager[None]:
    def faulty(planned: Tensor, coefficients: Mapping[str, float]) -> dict[str, Any]:
        return {name: coefficients[name] for name in list(coefficients)[1:]}

    return replaced(numerator_factors, "side_term_factors", faulty)


def _smoothed_over_padding() -> contextlib.AbstractContextManager[None]:
    original = VocabParallelLogits._token_losses

    def faulty(self: VocabParallelLogits, labels: Tensor, label_smoothing: float) -> Any:
        real = self.vocab_size
        padded = self.local.shape[-1] * (1 if self.group is None else self.group.size())
        return original(self, labels, label_smoothing * real / padded)

    return replaced(VocabParallelLogits, "_token_losses", faulty)


def _chunk_gradient_dropped() -> contextlib.AbstractContextManager[None]:
    original, number = chunks._WeightGradient.add, 0

    def faulty(self: chunks._WeightGradient, gradient: Tensor, hidden: Tensor) -> None:
        nonlocal number
        number += 1
        if number % 2:
            original(self, gradient, hidden)

    return replaced(chunks._WeightGradient, "add", faulty)


def _window() -> contextlib.AbstractContextManager[None]:
    original = context_parallel._window_mask

    def faulty(query_length: int, key_length: int, window: int, device: torch.device) -> Tensor:
        return original(query_length, key_length, window + 1, device)

    return replaced(context_parallel, "_window_mask", faulty)


def _rope_base() -> contextlib.AbstractContextManager[None]:
    original = inverse_frequencies

    def faulty(rope: RopeSection, head_dim: int) -> tuple[Tensor, float]:
        return original(rope.model_copy(update={"base": 1.1 * rope.base}), head_dim)

    return replaced(build, "inverse_frequencies", faulty)


def _softmax_scale() -> contextlib.AbstractContextManager[None]:
    original = context_parallel.RowAttention.__init__

    def faulty(self: context_parallel.RowAttention, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.scale *= 1.1

    return replaced(context_parallel.RowAttention, "__init__", faulty)


def _norm_epsilon() -> contextlib.AbstractContextManager[None]:
    original = norm.Norm.__init__

    def faulty(self: norm.Norm, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        original(self, config, hidden_size, 10 * eps)

    return replaced(norm.Norm, "__init__", faulty)


def _balance_times_top_k() -> contextlib.AbstractContextManager[None]:
    original = balance.RouterStats._term

    def faulty(self: balance.RouterStats, term: losses.RouterTerm, *arguments: Any) -> Any:
        found = original(self, term, *arguments)
        return found if term == losses.Z else found._replace(losses=found.losses * self._section.top_k)

    return replaced(balance.RouterStats, "_term", faulty)


def _expert_scaling() -> contextlib.AbstractContextManager[None]:
    original = choose

    def faulty(logits: Tensor, section: Any, expert_bias: Tensor | None) -> Any:
        return original(logits, section.model_copy(update={"scaling_factor": 1.0}), expert_bias)

    return replaced(router, "choose", faulty)


def _no_bias_correction() -> contextlib.AbstractContextManager[None]:
    """lr m / (sqrt(v) + epsilon), as another rate, epsilon and decay of the sound update."""
    original, num_updates = optimizer.Optimizer.update, 0

    def faulty(self: optimizer.Optimizer, rate: float, grad_norm: float) -> optimizer.Update:
        nonlocal num_updates
        num_updates += 1
        groups, decay = self.inner.param_groups, self._weight_decay
        beta1, beta2 = groups[0]["betas"]
        factor, root = 1 - beta1**num_updates, math.sqrt(1 - beta2**num_updates)
        for group in groups:
            group["eps"] /= root
        self._weight_decay *= root / factor
        try:
            return original(self, rate * factor / root, grad_norm)
        finally:
            self._weight_decay = decay
            for group in groups:
                group["eps"] *= root

    return replaced(optimizer.Optimizer, "update", faulty)


def _decay_without_rate() -> contextlib.AbstractContextManager[None]:
    original = optimizer.Optimizer.update

    def faulty(self: optimizer.Optimizer, rate: float, grad_norm: float) -> optimizer.Update:
        decay = self._weight_decay
        self._weight_decay = decay / rate
        try:
            return original(self, rate, grad_norm)
        finally:
            self._weight_decay = decay

    return replaced(optimizer.Optimizer, "update", faulty)


def _rate(change: Callable[[int, OptimizerSection], tuple[int, OptimizerSection]]) -> Plant:
    original = lr.learning_rate

    def faulty(number: int, optimizer: OptimizerSection, num_steps: int) -> float:
        return original(*change(number, optimizer), num_steps)

    return lambda: replaced(lr, "learning_rate", faulty)


def _one_step_late(number: int, section: OptimizerSection) -> tuple[int, OptimizerSection]:
    return max(0, number - 1), section


def _longer_warmup(number: int, section: OptimizerSection) -> tuple[int, OptimizerSection]:
    return number, section.model_copy(update={"warmup_steps": section.warmup_steps + 1})


SHARED_PLANTS: dict[str, Plant] = {
    "last-token-masked": _samples(_without_last_tokens),
    "masked-tokens-counted": _samples(lambda sample: replace(sample, mask=np.ones(len(sample.mask)))),
    "token-weights-squared": _samples(lambda sample: replace(sample, mask=sample.mask**2)),
    "sample-weights-ignored": _samples(lambda sample: replace(sample, weight=1.0)),
    "padding-counted": _padding_counted,
    "labels-shifted-twice": _batches(lambda fields: {"labels": fields["labels"].roll(-1, dims=1)}),
    "sample-read-twice": _every_second_sample,
    "positions-not-restarted": _batches(_positions_of_rows),
    "row-counted-as-sequence": _rows_as_sequences,
    "label-of-the-next-sample": _labels_of_next,
    "router-balance-by-row": _balance_of_rows,
    "tokens-ahead-across-documents": _looks_over_edges,
    "sequence-mean-plus-one": _divisor(["seq-mean-token-mean"], lambda total, term: total + 1),
    "square-root-left-out": _divisor(["seq-mean-token-sqrt"], lambda total, term: total if total > 0 else 1.0),
    "norm-length-off": _divisor(NORM_AGGREGATIONS, lambda total, term: float((term.norm_length or 0) + 1)),
    "empty-sequences-confused": _empty_sequences_confused,
    "side-terms-divided-by-main": _side_terms_by_main,
    "smoothing-with-padding": _smoothed_over_padding,
    "chunk-gradient-dropped": _chunk_gradient_dropped,
    "window-off-by-one": _window,
    "rope-base-off": _rope_base,
    "softmax-scale-off": _softmax_scale,
    "norm-epsilon-off": _norm_epsilon,
    "router-losses-times-top-k": _balance_times_top_k,
    "expert-scaling-ignored": _expert_scaling,
    "bias-correction-missing": _no_bias_correction,
    "decay-not-times-rate": _decay_without_rate,
    "rate-one-step-late": _rate(_one_step_late),
    "warmup-off-by-one": _rate(_longer_warmup),
}
