"""The objective, computed from the output of the last pipeline stage: on whole logits or chunk by chunk.

A loss function marked with `mtrain.per_token` is a sum over tokens, so it can be evaluated in chunks: the logits of
only one chunk exist at a time, and only for tokens that some term counts. The forward pass computes the gradient of
each chunk as well (`mtrain.core.loss.vocab_parallel.chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mtrain.arch.activations import chunk_tokens
from mtrain.config import Config
from mtrain.config.extras import TEMPERATURE
from mtrain.config.schema.loss import MAIN_TERM, LossSection, depth_term
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import loss_terms
from mtrain.core.batch.zigzag import slice_for_context_parallel
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.output_layer import DeferredLogits, Logits
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import Extras, LossPair, TermInputs, TokenInputs, joined
from mtrain.core.loss.sequences import PackedSequences, TokenSources
from mtrain.core.loss.vocab_parallel.chunks import LossOfChunk, Table, chunks, logits_of_rows, sum_over_chunks
from mtrain.core.loss.vocab_parallel.cross_entropy import compute_dtype
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.broadcast import broadcast_on_hosts
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.teacher import Teacher

ScalarOf = Callable[[Mapping[str, LossPair]], Tensor]
"""Maps the pairs of all terms to the scalar to differentiate; linear in the numerators."""
FurtherScore = Literal["entropy", "likeliest"]
"""Score of a position besides its label's log-probability: the entropy of the distribution in nats, or 1 if no token is
likelier than the label, else 0."""


class OutputLoss:
    """Computes the loss of each microbatch of one pass."""

    def __init__(
        self,
        whole: Sequence[Microbatch] | None,
        rows: Sequence[Microbatch],
        model: RankModel,
        objective: Objective,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepares the pass; a pipeline-parallel teacher runs now, on all microbatches.

        Args:
            whole: Microbatches from the loader; None on ranks that receive them by broadcast.
            rows: The same microbatches on the device, sliced for context parallelism.
            teacher: Teacher, if some term reads its logits.
        """
        self._config, self._groups, self._objective = model.config, model.groups, objective
        self._teacher_logits = None if teacher is None else teacher.logits_of(rows)
        keeps_logits_whole = model.config.loss.chunk_tokens == "whole" or bool(objective.whole_microbatch_terms)
        self._weighed = None if keeps_logits_whole else WeighedTokens(whole, rows, model.groups)

    def pairs(self, logits: Logits, batch: Microbatch) -> dict[str, LossPair]:
        """Returns the loss pair of every term, without a graph."""
        return self.scalar(logits, batch, _zero, torch.ones((), device=batch.labels.device))[1]

    def scalar(
        self, logits: Logits, batch: Microbatch, scalar_of: ScalarOf, expected_gradient: Tensor
    ) -> tuple[Tensor, dict[str, LossPair]]:
        """Returns the scalar to differentiate for one microbatch, and the loss pair of every term.

        Communicates only in the output layer and, for each chunk, in the loss functions.

        Args:
            batch: One of the objects in `rows`.
            expected_gradient: See `sum_over_chunks`.
        """
        teacher = None if self._teacher_logits is None else self._teacher_logits(batch)
        counts = None if self._weighed is None else self._weighed.of(batch)
        vocab_local = logits.main.layer.output_size_per_partition
        chunk = chunk_tokens(self._config.loss, vocab_local, self._groups.device.type == "cpu")
        if counts is None or chunk is None or _is_whole_as_good(counts, batch.labels.numel(), chunk):
            pairs = self._objective.pairs(term_inputs(logits, batch, self._config, self._groups, teacher))
            return scalar_of(pairs), pairs
        distributions = _Tokens.by_distribution(batch, len(self._config.data.source_names))
        selections = _selections(distributions, logits, batch, teacher, counts)
        table = selections[0].student.table
        terms = [term for selection in selections for term in selection.tokens.weights]
        sums = self._zero_pairs(terms, batch.labels.device)

        def loss_of_chunk(depth: int, rows: slice, local: Tensor) -> Tensor:
            pairs = self._objective.pairs(self._inputs_of_chunk(selections[depth], rows, local))
            for term, pair in pairs.items():
                sums[term] = _added(sums[term], pair)
            return scalar_of(pairs)

        if not sum(counts):
            # without a chunk nothing would read the factors, and other ranks would wait in their collective
            scalar_of(sums)
        hidden = [selection.student.hidden for selection in selections]
        are_consumed = all(self._objective.consumes_logits(selection.tokens.weights) for selection in selections)
        scalar = self._sum_over_chunks(
            table,
            hidden,
            loss_of_chunk,
            chunk_rows=chunk,
            expected_gradient=expected_gradient,
            reuses_memory=are_consumed,
        )
        dtype = torch.promote_types(table.weight.dtype, torch.float32)
        return scalar, {term: replace(pair, numerator=pair.numerator.to(dtype)) for term, pair in sums.items()}

    def _sum_over_chunks(self, table: Table, hidden: list[Tensor], loss_of: LossOfChunk, **options: Any) -> Tensor:
        # a method, so that tests can plant faults here
        return sum_over_chunks(table, hidden, loss_of, **options)

    def _zero_pairs(self, terms: Sequence[str], device: torch.device) -> dict[str, LossPair]:
        """Returns a pair of zeros for each term, in float64: float32 rounding would show the number of chunks."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        num_sources = len(self._config.data.source_names)
        by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=device) if num_sources else None
        return {term: LossPair(zero, zero, by_source if term == MAIN_TERM else None) for term in terms}

    def _inputs_of_chunk(self, selection: _Selection, rows: slice, local: Tensor) -> dict[str, TermInputs]:
        """Returns the input of each term's loss function for one chunk with logits `local`."""
        model, groups = self._config.model, self._groups
        # only here, where the gradient of a chunk is taken at once, and once
        is_consumed = self._objective.consumes_logits(selection.tokens.weights)
        student = selection.student.distribution(local, model, groups, is_consumed)
        teacher = None
        if selection.teacher is not None:
            teacher_local = logits_of_rows(selection.teacher.hidden[rows], selection.teacher.table.weight)
            teacher = selection.teacher.distribution(teacher_local, model, groups)
        tokens = selection.tokens.map(lambda values: values[:, rows])
        return _inputs(tokens, student, teacher, self._config.loss, groups, TokenInputs)


@dataclass(frozen=True)
class _Tokens:
    """What loss functions read about tokens besides logits: [batch, seq], or [1, n] for n selected tokens."""

    labels: Tensor
    tokens: Tensor
    weights: Mapping[str, Tensor]
    """Weights by term, for the terms that read this distribution."""
    denominator_weights: Mapping[str, Tensor]
    extras: Mapping[str, Tensor]
    sources: TokenSources | None = None
    packed: PackedSequences | None = None

    @classmethod
    def by_distribution(cls, batch: Microbatch, num_sources: int) -> list[_Tokens]:
        """Returns the tokens of the main logits, then those of each MTP depth."""
        packed = None if batch.sequence_ids is None else PackedSequences(batch.sequence_ids, batch.num_sequences)
        main_sources = None if batch.sources is None else TokenSources(batch.sources, num_sources)
        # extras and sources describe the prediction of the next token, so MTP depths have none
        inputs = [(batch.labels, batch.tokens, batch.extras, main_sources)]
        inputs += [(ahead.labels, ahead.tokens, {}, None) for ahead in batch.mtp]
        distributions = []
        for terms, (labels, tokens, extras, sources) in zip(terms_by_distribution(batch), inputs, strict=True):
            weights = {term: batch.weights[term] for term in terms}
            shares = {term: batch.denominator_weights[term] for term in terms}
            distributions.append(cls(labels, tokens, weights, shares, extras, sources, packed))
        return distributions

    def map(self, change: Callable[[Tensor], Tensor]) -> _Tokens:
        """Applies `change` to every tensor; drops `packed`, since chunks see no whole sequences."""

        def changed(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(value) for name, value in values.items()}

        return _Tokens(
            labels=change(self.labels),
            tokens=change(self.tokens),
            weights=changed(self.weights),
            denominator_weights=changed(self.denominator_weights),
            extras=changed(self.extras),
            sources=None if self.sources is None else replace(self.sources, ids=change(self.sources.ids)),
        )


class _Operands(NamedTuple):
    """Operands of the output layer for some tokens: their product gives the logits of these tokens."""

    hidden: Tensor
    """[n, hidden]."""
    table: Table
    deferred: DeferredLogits

    @classmethod
    def of(cls, deferred: DeferredLogits, index: Tensor | None) -> _Operands:
        """Selects tokens by index in [seq, batch] order; None selects all of them without a copy."""
        hidden, weight, buffer = deferred.operands()
        flat = hidden.flatten(0, 1)
        return cls(flat if index is None else flat.index_select(0, index), Table(weight, buffer), deferred)

    def distribution(
        self, local: Tensor, model: ModelSection, groups: Groups, is_consumed: bool = False
    ) -> VocabParallelLogits:
        """Returns the distributions given by products of the operands, [rows, 1, vocab_local]."""
        return vocab_parallel(self.deferred.capped(local), self.deferred, model, groups, is_consumed)


class _Selection(NamedTuple):
    """Tokens of one distribution that some term counts, as one row of n tokens."""

    tokens: _Tokens
    student: _Operands
    teacher: _Operands | None


def _selections(
    distributions: Sequence[_Tokens],
    logits: Logits,
    batch: Microbatch,
    teacher: DeferredLogits | None,
    counts: Sequence[int],
) -> list[_Selection]:
    """Returns the selection of the main logits, then one for each MTP depth; only the main logits have a teacher."""
    students, teachers = (logits.main, *logits.mtp), (teacher, *[None] * len(logits.mtp))
    selections = []
    for tokens, student_logits, teacher_logits, count in zip(distributions, students, teachers, counts, strict=True):
        index = None
        if count < tokens.labels.numel():
            index = true_positions(weighed(batch, [*tokens.weights]), count)
        row = tokens.map(partial(_select_row, index))
        student_operands = _Operands.of(student_logits, index)
        teacher_operands = None if teacher_logits is None else _Operands.of(teacher_logits, index)
        selections.append(_Selection(row, student_operands, teacher_operands))
    return selections


def _select_row(index: Tensor | None, rows: Tensor) -> Tensor:
    """Selects elements of a [batch, seq] tensor by index in [seq, batch] order; returns [1, n]."""
    flat = rows.t().reshape(-1)
    return (flat if index is None else flat[index]).unsqueeze(0)


def _added(total: LossPair, pair: LossPair) -> LossPair:
    """Adds the pair of one more chunk to the total, without its graph."""
    by_source = None
    if total.by_source is not None and pair.by_source is not None:
        by_source = total.by_source + pair.by_source
    diagnostics = dict(total.diagnostics)
    for name, value in pair.diagnostics.items():
        diagnostics[name] = joined(diagnostics[name], value) if name in diagnostics else value
    numerator = total.numerator + pair.numerator.detach().double()
    return LossPair(numerator, total.denominator + pair.denominator, by_source, diagnostics)


@torch.no_grad()
def label_log_probs(
    logits: Logits,
    batch: Microbatch,
    config: Config,
    groups: Groups,
    also: Sequence[FurtherScore] = (),
    temperature: float = 1.0,
) -> Tensor:
    """Returns the log-probability of every label, masked tokens included, and further scores of each position.

    Two all-reduces over TP for each chunk of tokens, and one for each further score. The logits are divided by the
    batch's own temperatures (an extra with one per token) if it has them, else by `temperature`.

    Returns:
        Log-probabilities in nats, then the scores in `also`, in its order, [1 + len(also), batch, seq] float32.
    """
    hidden, weight, _ = logits.main.operands()
    (seq, num_rows), labels = hidden.shape[:2], batch.labels.t().reshape(1, -1)
    flat, chunk = hidden.flatten(0, 1), chunk_tokens(config.loss, len(weight), groups.device.type == "cpu")
    divisors = None if TEMPERATURE not in batch.extras else batch.extras[TEMPERATURE].t().reshape(1, -1)
    parts = []
    for rows in chunks(len(flat), chunk or len(flat)):
        local = logits.main.capped(logits_of_rows(flat[rows], weight))
        distribution = vocab_parallel(local, logits.main, config.model, groups)
        distribution = distribution.divided_by(temperature if divisors is None else divisors[:, rows])
        of_labels = labels[:, rows]
        scores = [-distribution.cross_entropy(of_labels)]  # [1, rows]
        scores += [distribution.entropy() if name == "entropy" else distribution.is_largest(of_labels) for name in also]
        parts.append(torch.cat(scores))
    return torch.cat(parts, dim=1).view(-1, seq, num_rows).transpose(1, 2).float()


@torch.no_grad()
def score_summands(logits: Logits, batch: Microbatch, config: Config, groups: Groups) -> Tensor:
    """Returns each token's contribution to the score of its sequence, [batch, seq] float32.

    That is the log-probability of the token's label or, in a model with a head of one label, the head's output, which
    needs no collective over TP.
    """
    if config.model.output.head_rows:
        return vocab_parallel(logits.main.whole(), logits.main, config.model, groups).logsumexp()
    return label_log_probs(logits, batch, config, groups)[0]


def _is_whole_as_good(counts: Sequence[int], tokens: int, chunk: int) -> bool:
    """Says whether whole logits are as cheap: the tokens fit into one chunk and nearly all of them count."""
    # leaving out an eighth saves more than copying the selection costs
    return tokens <= chunk and 8 * sum(counts) > 7 * len(counts) * tokens


def _zero(pairs: Mapping[str, LossPair]) -> Tensor:
    return torch.zeros((), device=next(iter(pairs.values())).numerator.device)


def vocab_parallel(
    local: Tensor, deferred: DeferredLogits, model: ModelSection, groups: Groups, is_consumed: bool = False
) -> VocabParallelLogits:
    """Wraps this rank's columns of the logits, [seq, batch, vocab_local], for the loss functions; see
    `VocabParallelLogits.consumed` for `is_consumed`."""
    if rows := model.output.head_rows:
        return VocabParallelLogits(local, None, 0, rows)
    # the padded vocabulary is split evenly
    first_index = groups.tp_rank * local.shape[-1]
    group = groups.tp if groups.layout.tp > 1 else None
    # a compiled loss computes exponentials twice, which costs a CPU more than the passes it saves
    overwrites = is_consumed and local.device.type == "cpu" and local.dtype == compute_dtype(local)
    is_compiled = deferred.layer.compiles_regions and not overwrites
    distribution = VocabParallelLogits(local, group, first_index, model.vocab_size, is_compiled)
    return distribution.consumed() if is_consumed else distribution


def term_inputs(
    logits: Logits,
    batch: Microbatch,
    config: Config,
    groups: Groups,
    teacher_logits: DeferredLogits | None = None,
) -> dict[str, TermInputs]:
    """Returns the input of each term's loss function for a sliced microbatch, with whole logits.

    All terms share one softmax, except that each MTP depth has its own. `teacher_logits` have the shape of
    `logits.main`.
    """

    def distribution(deferred: DeferredLogits) -> VocabParallelLogits:
        return vocab_parallel(deferred.whole(), deferred, config.model, groups)

    main, *further = _Tokens.by_distribution(batch, len(config.data.source_names))
    student, teacher = distribution(logits.main), None if teacher_logits is None else distribution(teacher_logits)
    inputs = _inputs(main, student, teacher, config.loss, groups)
    for deferred, tokens in zip(logits.mtp, further, strict=True):
        inputs |= _inputs(tokens, distribution(deferred), None, config.loss, groups)
    return inputs


def _inputs(
    tokens: _Tokens,
    logits: VocabParallelLogits,
    teacher: VocabParallelLogits | None,
    section: LossSection,
    groups: Groups,
    kind: type[TermInputs] = TermInputs,
) -> dict[str, TermInputs]:
    """Returns the input of each term that reads one distribution."""
    terms, extras = loss_terms(section), Extras(tokens.extras)
    return {
        term: kind(
            logits=logits,
            labels=tokens.labels,
            weights=tokens.weights[term],
            denominator_weights=tokens.denominator_weights[term],
            tokens=tokens.tokens,
            teacher=teacher,
            context=groups.cp if groups.layout.cp > 1 else None,
            aggregation=terms.get(term, section).aggregation,  # MTP depths use the main term's
            packed=tokens.packed,
            extras=extras,
            sources=tokens.sources if term == MAIN_TERM else None,
        )
        for term in tokens.weights
    }


def terms_by_distribution(batch: Microbatch) -> list[list[str]]:
    """Returns the terms that read the main logits, then the term of each MTP depth."""
    depths = [depth_term(number) for number in range(1, len(batch.mtp) + 1)]
    return [[term for term in batch.weights if term not in depths], *([depth] for depth in depths)]


def weighed(batch: Microbatch, terms: Sequence[str]) -> Tensor:
    """Says which tokens have a weight or a share of the denominator in one of the terms, [batch, seq] bool."""
    # a token of weight 0 can still carry the share of an empty sequence (loss.empty_sequences=include)
    counted = [values[term] != 0 for term in terms for values in (batch.weights, batch.denominator_weights)]
    return torch.stack(counted).any(0)


class WeighedTokens:
    """Counts the tokens with a weight in each microbatch of a pass, without making the host wait for the device."""

    def __init__(self, whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], groups: Groups) -> None:
        """Counts the tokens of `rows` now; the arguments are those of `OutputLoss`."""
        self._numbers = {id(batch): number for number, batch in enumerate(rows)}
        self._counts = _count_tokens(rows) if groups.device.type == "cpu" else _counts_from_reader(whole, rows, groups)

    def of(self, batch: Microbatch) -> list[int]:
        """Returns the number of tokens for the main logits, then for each MTP depth; `batch` must be in `rows`."""
        return self._counts[self._numbers[id(batch)]]


def _count_tokens(batches: Sequence[Microbatch]) -> list[list[int]]:
    # numpy, since the batches are on the CPU
    return [[int(weighed(batch, terms).numpy().sum()) for terms in terms_by_distribution(batch)] for batch in batches]


def _counts_from_reader(
    whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], groups: Groups
) -> list[list[int]]:
    """Returns the counts made by the rank that read the batches. One broadcast within TP, between hosts."""
    counts = None
    if whole is not None:  # a TP group shares one context-parallel slice, so one rank can count for all
        slices = [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in whole]
        counts = torch.tensor(_count_tokens(slices))
    shape = (len(rows), len(terms_by_distribution(rows[0])))
    return broadcast_on_hosts(counts, shape, torch.int64, groups).numpy().tolist()


def true_positions(is_weighed: Tensor, count: int) -> Tensor:
    """Returns the increasing positions, [count] int64, of the `count` true elements of a [batch, seq] mask, counted in
    [seq, batch] order."""
    # not nonzero(): the host would have to wait for its size; a stable sort keeps equal keys in their order
    keys = is_weighed.t().reshape(-1).to(torch.uint8)
    return keys.argsort(descending=True, stable=True)[:count]
