"""Faults that every layout shares, including one process with one microbatch.

Comparing layouts cannot find them; the reference does, because it shares no code with the trainer.

Faults sit in code that all layouts run: data, loss definition, a module, the optimizer. A wrong number is set in the
ranks' configuration, which the reference does not see.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import _GeneratorContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.arch import padded_vocab_size
from mtrain.arch.lr import learning_rate
from mtrain.config import Config
from mtrain.config.schema.loss import TermSection, depth_term
from mtrain.config.schema.train import OptimizerSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import Place, RowForm, collate
from mtrain.core.batch.datum import Datum, sample_of
from mtrain.core.batch.order import SampleOrder, SamplePosition
from mtrain.core.batch.sample import Sample, TokenizedSample
from mtrain.core.engine.finalize import NumeratorFactors
from mtrain.core.engine.loss_reduction import PairAccumulator
from mtrain.core.engine.optimizer import Optimizer, Update
from mtrain.core.engine.router_balance import Factors, RouterBalance
from mtrain.core.layers.attention.core_attention import RowAttention
from mtrain.core.loss import router as losses
from mtrain.core.loss.vocab_parallel.chunks import LossOfChunk, Table
from mtrain.core.ranks.broadcast import slice_for_rank
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.loss import OutputLoss
from mtrain.data.loader import StepLoader
from mtrain.data.samples.sft import sample_of_record
from mtrain.data.sources import Blended
from tests.verify.planted.plants import (
    Plant,
    become,
    collating,
    configured,
    in_samples,
    in_step,
    in_worker,
    modules,
    with_values,
)

_Rows = Sequence[Sequence[Sample]]


def _collated(change: Callable[[_Rows], _Rows]) -> Plant:
    """Changes the samples of microbatches."""

    def faulty(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
        return collate(change(rows), form, first_of_step)

    return collating(faulty)


def _samples(change: Callable[[Sample], Sample]) -> Plant:
    return _collated(lambda rows: [[change(sample) for sample in row] for row in rows])


def _without_last_tokens(sample: Sample) -> Sample:
    """Masks the last predicted token of each document."""
    size = len(sample.mask)
    starts = np.zeros(size, np.int32) if sample.document_starts is None else sample.document_starts
    mask = sample.mask.copy()
    for end in (*np.flatnonzero(np.diff(starts)), size - 1) if size else ():
        counted = np.flatnonzero((starts == starts[end]) & (mask > 0))
        mask[counted[-1:]] = 0.0
    return replace(sample, mask=mask)


def _extras_not_shifted(sample: Sample) -> Sample:
    return replace(sample, extras={name: np.roll(each, 1) for name, each in sample.extras.items()})


def _datum(change: Callable[[Datum], Datum]) -> Plant:
    """Changes a user's data before they become samples."""

    def faulty(datum: Datum, *others: Any) -> Sample:
        return sample_of(change(datum), *others)

    return in_samples("sample_of", faulty)


def _record(change: Callable[[TokenizedSample], TokenizedSample]) -> Plant:
    """Changes records of a file before they become samples."""

    def faulty(found: TokenizedSample, *others: Any) -> Sample:
        return sample_of_record(change(found), *others)

    return in_samples("sample_of_record", faulty)


def _datum_weights(datum: Datum) -> Datum:
    return replace(datum, weights=None if datum.weights is None else np.roll(datum.weights, 1).tolist())


def _datum_extras(datum: Datum) -> Datum:
    return replace(datum, extras={name: np.roll(each, 1).tolist() for name, each in datum.extras.items()})


def _record_weights(found: TokenizedSample) -> TokenizedSample:
    return replace(found, loss_weights=np.roll(found.loss_weights, 1))


def _record_extras(found: TokenizedSample) -> TokenizedSample:
    return replace(found, extras=None if found.extras is None else np.roll(found.extras, 1, axis=0))


def _padding_counted(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
    batch = collate(rows, replace(form, with_padding=True), first_of_step)
    assert batch.is_padding is not None, "it was asked for"
    weights, shares = (
        {term: each.masked_fill(batch.is_padding, 1.0) for term, each in of_terms.items()}
        for of_terms in (batch.weights, batch.denominator_weights)
    )
    known = batch.is_padding if form.with_padding else None
    return replace(batch, weights=weights, denominator_weights=shares, is_padding=known)


def _padding_by_token_id(batch: Microbatch) -> dict[str, Any]:
    """Takes the token that fills rows for padding wherever it stands, as a mask from a tokenizer's pad id does."""
    is_filler = batch.tokens == 0
    weights, shares = (
        {term: each.masked_fill(is_filler, 0.0) for term, each in of_terms.items()}
        for of_terms in (batch.weights, batch.denominator_weights)
    )
    return {"weights": weights, "denominator_weights": shares}


def _documents_end_at_fillers(batch: Microbatch) -> dict[str, Any]:
    """Lets a document end at the token that fills rows, wherever it stands, for attention alone."""
    assert batch.document_starts is not None, "documents are isolated"
    places = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    after = torch.where(batch.tokens == 0, places + 1, 0).roll(1, dims=1)
    after[:, 0] = 0
    starts = torch.maximum(batch.document_starts, after.cummax(1).values.to(batch.document_starts.dtype))
    return {"document_starts": starts}


def _fillers_without_experts(batch: Microbatch) -> dict[str, Any]:
    """Hides the token that fills rows from the losses of routers, wherever it stands."""
    assert batch.is_padding is not None, "the model has experts"
    return {"is_padding": batch.is_padding | (batch.tokens == 0)}


def _rows_as_sequences(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
    joined = collate([[_joined(row)] if row else [] for row in rows], form, first_of_step)
    sound = collate(rows, form, first_of_step)
    return replace(sound, weights=joined.weights, denominator_weights=joined.denominator_weights)


def _joined(row: Sequence[Sample]) -> Sample:
    """Joins all samples of a row; token weights include sample weights."""
    filled = [sample for sample in row if len(sample.tokens)]
    begins = itertools.accumulate((sample.width for sample in filled), initial=0)
    starts = [
        begin + (np.zeros(sample.width, np.int32) if sample.document_starts is None else sample.document_starts)
        for begin, sample in zip(begins, filled)
    ]
    return Sample(
        tokens=_chained([sample.tokens for sample in filled]),
        labels=_chained([sample.labels for sample in filled]),
        mask=_chained([sample.mask * sample.weight for sample in filled]),
        document_starts=_chained(starts).astype(np.int32),
    )


def _chained(parts: Sequence[Any]) -> Any:
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _labels_of_next(row: Sequence[Sample]) -> Sequence[Sample]:
    changed = list(row)
    for number, (sample, following) in enumerate(itertools.pairwise(row)):
        if len(sample.tokens) and len(following.tokens):
            labels, mask = sample.labels.copy(), sample.mask.copy()
            labels[-1], mask[-1] = following.tokens[0], 1.0
            changed[number] = replace(sample, labels=labels, mask=mask)
    return changed


def _batches(change: Callable[[Microbatch], dict[str, Any]]) -> Plant:
    """Changes fields of every microbatch."""

    def faulty(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
        batch = collate(rows, form, first_of_step)
        return replace(batch, **change(batch))

    return collating(faulty)


def _positions_of_rows(batch: Microbatch) -> dict[str, Any]:
    positions = batch.positions
    return {"positions": torch.arange(positions.shape[1]).expand_as(positions).contiguous()}


def _reweighed(aggregation: str, factor: Callable[[float], float]) -> Callable[..., Microbatch]:
    """Multiplies the weights of a sample's tokens by a factor of the sum of its mask."""

    def faulty(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
        batch = collate(rows, form, first_of_step)
        factors = torch.zeros(batch.tokens.shape)
        for own, row in zip(factors, rows, strict=True):
            begins = itertools.accumulate((sample.width for sample in row), initial=0)
            for begin, sample in zip(begins, row):
                own[begin : begin + sample.width] = factor(math.fsum(sample.mask))
        chosen = [term for term, section in form.terms.items() if section.aggregation == aggregation]
        return replace(batch, weights=batch.weights | {term: batch.weights[term] * factors for term in chosen})

    return faulty


def _terms(change: Callable[[TermSection], dict[str, Any]]) -> Plant:
    """Changes main and side terms in the configuration."""

    def changed(loss: Any) -> dict[str, Any]:
        sides = {name: with_values(side, change(side)) for name, side in loss.side_terms.items()}
        return {**change(loss), "side_terms": sides}

    return Plant(config=configured("loss", changed))


_OTHER = {"include": "exclude", "exclude": "include"}


def _looks_over_edges(rows: _Rows, form: RowForm, first_of_step: Place | None) -> Microbatch:
    sound = collate(rows, form, first_of_step)
    over = collate(rows, replace(form, isolates_documents=False), first_of_step)
    depths = [depth_term(depth) for depth in range(1, form.num_predictions)]
    weights = sound.weights | {name: over.weights[name] for name in depths}
    shares = sound.denominator_weights | {name: over.denominator_weights[name] for name in depths}
    return replace(sound, mtp=over.mtp, weights=weights, denominator_weights=shares)


class _EverySecond(SampleOrder):
    def locate(self, g: int) -> SamplePosition:
        return super().locate(g - g % 2)


class _ReadsTwice(StepLoader):
    def __init__(self, config: Config, dp_rank: int, dp_size: int) -> None:
        super().__init__(config, dp_rank, dp_size)
        assert isinstance(self.stream, Blended), "a condition of the fault"
        become(self.stream.order, _EverySecond)


def _balance_of_rows(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    return [replace(batch, sequence_ids=None) for batch in slice_for_rank(batches, groups)]


class _SideTermsByMain(NumeratorFactors):
    def of_terms(self) -> Mapping[str, float | Tensor]:
        return self._coefficients


def _smoothed_over_padding(config: Config) -> Config:
    share = config.model.vocab_size / padded_vocab_size(config.model, config.layout.tp)

    def change(term: TermSection) -> dict[str, Any]:
        given = term.options.get("label_smoothing")
        return {} if given is None else {"options": term.options | {"label_smoothing": given * share}}

    return _terms(change).configured(config)


class _ChunksDropped(OutputLoss):
    """Loss that drops every second chunk from the table's gradient."""

    def _sum_over_chunks(self, table: Table, hidden: list[Tensor], loss_of: LossOfChunk, **options: Any) -> Tensor:
        def every_second(first: int) -> LossOfChunk:
            numbers = itertools.count(first)

            def loss(number: int, rows: slice, local: Tensor) -> Tensor:
                return local.sum() * 0 if next(numbers) % 2 else loss_of(number, rows, local)

            return loss

        kept, dropped = (
            super(_ChunksDropped, self)._sum_over_chunks(kept_table, hidden, every_second(first), **options)
            for first, kept_table in enumerate((table, Table(table.weight.detach())))
        )
        return kept + dropped


def _softmax_scale(chunks: Sequence[nn.Module]) -> None:
    for attention in modules(chunks, RowAttention):
        attention.scale *= 1.1


class _ScaledPairs(PairAccumulator):
    """Multiplies the sums of routers."""

    factors: Tensor

    def add_router(self, numerators: Tensor, denominators: Tensor) -> None:
        super().add_router(numerators * self.factors, denominators)


class _BalanceTimesTopK(RouterBalance):
    def watching(
        self, accumulator: PairAccumulator, factors: Factors, num_sequences: int
    ) -> _GeneratorContextManager[None]:
        top_k = self.routers[0].section.top_k if self.routers else 1
        times = torch.tensor([1.0 if term == losses.Z else top_k for term in self.terms], device=self._groups.device)
        scaled: Any = copy.copy(accumulator)  # adds to the same tensors
        become(scaled, _ScaledPairs)
        scaled.factors = times
        return super().watching(scaled, lambda: factors() * times, num_sequences)


class _LoadsOfNextLayer(RouterBalance):
    """Counts layers without a bias among those that have one."""

    def _sum_loads(self, counts: Tensor) -> None:
        super()._sum_loads(counts)
        counts.copy_(counts.roll(1, dims=0))


class _NoBiasCorrection(Optimizer):
    """Makes lr m / (sqrt(v) + epsilon) by changing rate, epsilon and decay of the sound update."""

    _num_updates = 0

    def update(self, lr: float, grad_norm: float) -> Update:
        self._num_updates += 1
        groups, decay = self.inner.param_groups, self._weight_decay
        beta1, beta2 = groups[0]["betas"]
        factor, root = 1 - beta1**self._num_updates, math.sqrt(1 - beta2**self._num_updates)
        for group in groups:
            group["eps"] /= root
        self._weight_decay *= root / factor
        try:
            return super().update(lr * factor / root, grad_norm)
        finally:
            self._weight_decay = decay
            for group in groups:
                group["eps"] *= root


class _DecayWithoutRate(Optimizer):
    def update(self, lr: float, grad_norm: float) -> Update:
        decay = self._weight_decay
        self._weight_decay = decay / lr
        try:
            return super().update(lr, grad_norm)
        finally:
            self._weight_decay = decay


def _one_step_late(update: int, section: OptimizerSection, num_steps: int) -> float:
    return learning_rate(max(0, update - 1), section, num_steps)


def _longer_warmup(update: int, section: OptimizerSection, num_steps: int) -> float:
    longer = with_values(section, {"warmup_steps": section.warmup_steps + 1})
    return learning_rate(update, longer, num_steps)


def _model(change: Callable[[Any], dict[str, Any]]) -> Plant:
    return Plant(config=configured("model", change))


SHARED_PLANTS: dict[str, Plant] = {
    "last-token-masked": _samples(_without_last_tokens),
    "masked-tokens-counted": _samples(lambda sample: replace(sample, mask=np.ones(len(sample.mask)))),
    "token-weights-squared": _samples(lambda sample: replace(sample, mask=sample.mask**2)),
    "sample-weights-ignored": _samples(lambda sample: replace(sample, weight=1.0)),
    "padding-counted": collating(_padding_counted),
    "padding-by-token-id": _batches(_padding_by_token_id),
    "attention-ends-at-pad-id": _batches(_documents_end_at_fillers),
    "pad-id-hidden-from-routers": _batches(_fillers_without_experts),
    "labels-shifted-twice": _batches(lambda batch: {"labels": batch.labels.roll(-1, dims=1)}),
    "extras-not-shifted": _samples(_extras_not_shifted),
    "datum-weights-shifted": _datum(_datum_weights),
    "datum-extras-shifted": _datum(_datum_extras),
    "record-weights-shifted": _record(_record_weights),
    "record-extras-shifted": _record(_record_extras),
    "sample-read-twice": in_samples("StepLoader", _ReadsTwice),
    "positions-not-restarted": _batches(_positions_of_rows),
    "row-counted-as-sequence": collating(_rows_as_sequences),
    "label-of-the-next-sample": _collated(lambda rows: [_labels_of_next(row) for row in rows]),
    "router-balance-by-row": in_step("slice_for_rank", _balance_of_rows),
    "tokens-ahead-across-documents": collating(_looks_over_edges),
    "sequence-mean-plus-one": collating(_reweighed("seq-mean-token-mean", lambda total: total / (total + 1))),
    "square-root-left-out": collating(
        _reweighed("seq-mean-token-sqrt", lambda total: 1 / math.sqrt(total) if total > 0 else 1.0)
    ),
    "norm-length-off": _terms(lambda term: {"norm_length": term.norm_length and term.norm_length + 1}),
    "empty-sequences-confused": _terms(lambda term: {"empty_sequences": _OTHER[term.empty_sequences]}),
    "side-terms-divided-by-main": in_step("NumeratorFactors", _SideTermsByMain),
    "smoothing-with-padding": Plant(config=_smoothed_over_padding),
    "chunk-gradient-dropped": in_step("OutputLoss", _ChunksDropped),
    "window-off-by-one": _model(lambda model: {"sliding_window": model.sliding_window + 1}),
    "rope-base-off": _model(lambda model: {"rope": with_values(model.rope, {"base": 1.1 * model.rope.base})}),
    "rotary-of-whole-heads": _model(lambda model: {"rope": with_values(model.rope, {"partial": 1.0})}),
    "queries-of-one-temperature": _model(
        lambda model: {"rope": with_values(model.rope, {"attention_temperature": 0.0})}
    ),
    "softmax-scale-off": Plant(change_model=_softmax_scale),
    "norm-epsilon-off": _model(lambda model: {"norm_epsilon": 10 * model.norm_epsilon}),
    "router-losses-times-top-k": in_step("RouterBalance", _BalanceTimesTopK),
    "loads-of-the-next-layer": in_step("RouterBalance", _LoadsOfNextLayer),
    "expert-scaling-ignored": _model(lambda model: {"experts": with_values(model.experts, {"scaling_factor": 1.0})}),
    "bias-correction-missing": in_worker("Optimizer", _NoBiasCorrection),
    "decay-not-times-rate": in_worker("Optimizer", _DecayWithoutRate),
    "rate-one-step-late": in_worker("learning_rate", _one_step_late),
    "warmup-off-by-one": in_worker("learning_rate", _longer_warmup),
}
