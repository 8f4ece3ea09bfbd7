"""Objective computed from the output of the last pipeline stage, on whole logits or on a few tokens at a time.

Losses of functions marked with `mtrain.per_token` are sums over tokens, so they are added up over chunks: logits exist
for one chunk at a time, and only for tokens that some term counts. A chunk's gradient is computed in the forward pass
(`mtrain.core.loss.vocab_parallel.chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtrain.arch.activations import chunk_tokens
from mtrain.config import Config
from mtrain.config.extras import TEMPERATURE
from mtrain.config.schema.loss import MAIN_TERM, depth_term
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import loss_terms
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.output_layer import DeferredLogits, Logits, Operands, softcapped
from mtrain.core.loss.diagnostics import joined
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.pair import Extras, LossPair, TermInputs, TokenInputs
from mtrain.core.loss.sequences import PackedSequences, TokenSources
from mtrain.core.loss.vocab_parallel.chunks import LossOfChunk, chunks, logits_of_rows, sum_over_chunks
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.core.ranks.groups import Groups
from mtrain.core.step.teacher import Teacher
from mtrain.core.step.weighed_tokens import WeighedTokens, places, terms_by_distribution, weighed

ScalarOf = Callable[[Mapping[str, LossPair]], Tensor]
"""Function of the pairs that returns the scalar to differentiate; linear in the numerators."""


class OutputLoss:
    """Loss of the microbatches of one pass."""

    def __init__(
        self,
        whole: Sequence[Microbatch] | None,
        rows: Sequence[Microbatch],
        model: RankModel,
        objective: Objective,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepares the pass; a teacher with a pipeline runs now.

        Args:
            whole: Microbatches from the loader; None on ranks that receive theirs.
            rows: The same microbatches on the device, sliced for context parallelism.
        """
        self._config, self._groups, self._objective = model.config, model.groups, objective
        self._teacher_logits = None if teacher is None else teacher.logits_of(rows)
        is_whole = model.config.loss.chunk_tokens == "whole" or bool(objective.whole_microbatch_terms)
        self._weighed = None if is_whole else WeighedTokens(whole, rows, model.groups)

    def pairs(self, logits: Logits, batch: Microbatch) -> dict[str, LossPair]:
        """Returns the sums of every term, without a graph."""
        return self.scalar(logits, batch, _nothing, torch.ones((), device=batch.labels.device))[1]

    def scalar(
        self, logits: Logits, batch: Microbatch, scalar_of: ScalarOf, expected_gradient: Tensor
    ) -> tuple[Tensor, dict[str, LossPair]]:
        """Returns the scalar that a microbatch is differentiated from, and the sums of every term.

        Collectives: those of the loss functions for each chunk, and those of the output layer.

        Args:
            batch: Microbatch, one of `rows`.
            expected_gradient: Gradient that the scalar is expected to get; see `sum_over_chunks`.
        """
        teacher = None if self._teacher_logits is None else self._teacher_logits(batch)
        counts = None if self._weighed is None else self._weighed.of(batch)
        chunk = chunk_tokens(self._config.loss, _vocab_local(logits.main), _is_on_cpu(self._groups))
        if counts is None or chunk is None or _is_whole_as_good(counts, batch.labels.numel(), chunk):
            pairs = self._objective.pairs(term_inputs(logits, batch, self._config, self._groups, teacher))
            return scalar_of(pairs), pairs
        distributions = self._distributions(logits, batch, teacher, counts)
        terms = [term for each in distributions for term in each.weights]
        dtype = torch.promote_types(distributions[0].weight.dtype, torch.float32)
        sums = _Sums(terms, dtype, batch.labels.device, len(self._config.data.source_names))

        def loss_of_chunk(number: int, rows: slice, local: Tensor) -> Tensor:
            pairs = self._objective.pairs(self._term_inputs(distributions[number], rows, local))
            sums.add(pairs)
            return scalar_of(pairs)

        if not sum(counts):
            # no chunk asks for the factors of terms, but other ranks wait for this one in their collective
            scalar_of(sums.pairs())
        hidden, weight = [each.hidden for each in distributions], distributions[0].weight
        return self._sum_over_chunks(weight, hidden, loss_of_chunk, chunk, expected_gradient), sums.pairs()

    def _sum_over_chunks(
        self, weight: Tensor, hidden: list[Tensor], loss_of: LossOfChunk, chunk: int, expected_gradient: Tensor
    ) -> Tensor:
        return sum_over_chunks(weight, hidden, loss_of, chunk, expected_gradient)

    def _distributions(
        self, logits: Logits, batch: Microbatch, teacher: DeferredLogits | None, counts: Sequence[int]
    ) -> list[_Distribution]:
        terms = terms_by_distribution(batch)
        main = _Distribution.of(
            logits.main, batch.labels, batch.tokens, teacher, batch.extras, batch, terms[0], counts[0]
        )
        # extras belong to the next token: tokens further ahead have none
        return [main] + [
            _Distribution.of(deferred, ahead.labels, ahead.tokens, None, {}, batch, names, count)
            for deferred, ahead, names, count in zip(logits.mtp, batch.mtp, terms[1:], counts[1:], strict=True)
        ]

    def _term_inputs(self, of: _Distribution, rows: slice, local: Tensor) -> dict[str, TokenInputs]:
        """Returns the input of each term's function for one chunk."""
        student = vocab_parallel(softcapped(local, of.softcap), self._config.model, self._groups)
        teacher = None
        if of.teacher is not None:
            teacher_local = logits_of_rows(of.teacher.hidden[rows], of.teacher.weight)
            teacher_local = softcapped(teacher_local, of.teacher_softcap)
            teacher = vocab_parallel(teacher_local, self._config.model, self._groups)
        context = self._groups.cp if self._groups.layout.cp > 1 else None
        terms = loss_terms(self._config.loss)
        # one slice for all terms: `divided_by` compares temperatures by identity
        extras = Extras({name: each[:, rows] for name, each in of.extras.items()})
        return {
            term: TokenInputs(
                logits=student,
                labels=of.labels[:, rows],
                weights=of.weights[term][:, rows],
                denominator_weights=of.denominator_weights[term][:, rows],
                tokens=of.tokens[:, rows],
                teacher=teacher,
                context=context,
                aggregation=terms.get(term, self._config.loss).aggregation,
                extras=extras,
                sources=self._sources(of, rows) if term == MAIN_TERM else None,
            )
            for term in of.weights
        }

    def _sources(self, of: _Distribution, rows: slice) -> TokenSources | None:
        return None if of.sources is None else TokenSources(of.sources[:, rows], len(self._config.data.source_names))


@dataclass(frozen=True)
class _Distribution:
    """Tokens of one distribution that some term counts, as one row of n."""

    hidden: Tensor
    """Hidden states, [n, hidden]."""
    weight: Tensor
    """Table of the output layer, [vocab_local, hidden]."""
    labels: Tensor
    """Labels, [1, n], as all tensors below."""
    tokens: Tensor
    weights: dict[str, Tensor]
    denominator_weights: dict[str, Tensor]
    extras: dict[str, Tensor]
    sources: Tensor | None
    teacher: Operands | None
    """Hidden states of the same tokens in the teacher, and its table; None without a teacher."""
    softcap: float | None
    """Bound of the logits."""
    teacher_softcap: float | None

    @classmethod
    def of(
        cls,
        deferred: DeferredLogits,
        labels: Tensor,
        tokens: Tensor,
        teacher: DeferredLogits | None,
        extras: Mapping[str, Tensor],
        batch: Microbatch,
        terms: Sequence[str],
        count: int,
    ) -> _Distribution:
        """Selects the tokens, in [seq, batch] order."""
        operands = deferred.operands()
        # no index if every token counts, so that nothing is copied
        index = None if count == labels.numel() else places(weighed(batch, terms), count)

        def one_row(rows: Tensor) -> Tensor:
            flat = rows.t().reshape(-1)
            return (flat if index is None else flat[index]).unsqueeze(0)

        return cls(
            hidden=_selected(operands.hidden, index),
            weight=operands.weight,
            labels=one_row(labels),
            tokens=one_row(tokens),
            weights={term: one_row(batch.weights[term]) for term in terms},
            denominator_weights={term: one_row(batch.denominator_weights[term]) for term in terms},
            extras={name: one_row(extra) for name, extra in extras.items()},
            sources=None if batch.sources is None else one_row(batch.sources),
            teacher=None if teacher is None else _selected_operands(teacher, index),
            softcap=deferred.softcap,
            teacher_softcap=None if teacher is None else teacher.softcap,
        )


class _Sums:
    """Sums of the pairs of all chunks."""

    def __init__(self, terms: Sequence[str], dtype: torch.dtype, device: torch.device, num_sources: int) -> None:
        self._dtype = dtype
        # float64, since the number of float32 parts depends on the size of a chunk
        self._sums = {term: torch.zeros(2, dtype=torch.float64, device=device) for term in terms}
        self._diagnostics: dict[str, dict[str, Tensor]] = {term: {} for term in terms}
        self._by_source = torch.zeros(2, num_sources, dtype=torch.float64, device=device) if num_sources else None

    def add(self, pairs: Mapping[str, LossPair]) -> None:
        for term, pair in pairs.items():
            self._sums[term] += torch.stack([pair.numerator.detach().double(), pair.denominator])
            known = self._diagnostics[term]
            for name, value in pair.diagnostics.items():
                known[name] = joined(known[name], value) if name in known else value
        if self._by_source is not None and MAIN_TERM in pairs:
            found = pairs[MAIN_TERM].by_source
            self._by_source = None if found is None else self._by_source + found

    def pairs(self) -> dict[str, LossPair]:
        return {
            term: LossPair(
                numerator.to(self._dtype),
                denominator,
                self._by_source if term == MAIN_TERM else None,
                self._diagnostics[term],
            )
            for term, (numerator, denominator) in self._sums.items()
        }


@torch.no_grad()
def label_log_probs(
    logits: Logits,
    batch: Microbatch,
    config: Config,
    groups: Groups,
    with_entropy: bool = False,
    temperature: float = 1.0,
) -> Tensor:
    """Returns the log-probability of the label of each token, whatever its weights, and the entropy if wanted.

    Two all-reduces over TP for each chunk of tokens, three with the entropy.

    Args:
        temperature: Divisor of the logits, unless the batch has an extra with that of each token.

    Returns:
        Log-probabilities in nats, [1, batch, seq] float32; [2, batch, seq] with the entropies.
    """
    hidden, weight = logits.main.operands()
    (seq, num_rows), labels = hidden.shape[:2], batch.labels.t().reshape(1, -1)
    flat, chunk = hidden.flatten(0, 1), chunk_tokens(config.loss, len(weight), _is_on_cpu(groups))
    divisors = None if TEMPERATURE not in batch.extras else batch.extras[TEMPERATURE].t().reshape(1, -1)
    found = []
    for rows in chunks(len(flat), chunk or len(flat)):
        local = softcapped(logits_of_rows(flat[rows], weight), logits.main.softcap)
        distribution = vocab_parallel(local, config.model, groups)
        distribution = distribution.divided_by(temperature if divisors is None else divisors[:, rows])
        scores = [-distribution.cross_entropy(labels[:, rows])]  # [1, rows]
        found.append(torch.cat([*scores, distribution.entropy()] if with_entropy else scores))
    return torch.cat(found, dim=1).view(-1, seq, num_rows).transpose(1, 2).float()


@torch.no_grad()
def score_summands(logits: Logits, batch: Microbatch, config: Config, groups: Groups) -> Tensor:
    """Returns what each token adds to the score of its sequence, [batch, seq] float32.

    The log-probability of its label, or the number of a head of one label, which needs no collective over TP.
    """
    if config.model.output.head_rows:
        return vocab_parallel(logits.main.whole(), config.model, groups).logsumexp()
    return label_log_probs(logits, batch, config, groups)[0]


def _is_whole_as_good(counts: Sequence[int], tokens: int, chunk: int) -> bool:
    """Says whether whole logits cost no more: there are few tokens, and nearly all of them count.

    Args:
        counts: Number of tokens that count, by distribution.
        tokens: Number of tokens of each distribution.
    """
    # leaving out an eighth saves more than copying the selection costs
    return tokens <= chunk and 8 * sum(counts) > 7 * len(counts) * tokens


def _is_on_cpu(groups: Groups) -> bool:
    return groups.device.type == "cpu"


def _vocab_local(logits: DeferredLogits) -> int:
    return logits.layer.output_size_per_partition


def _selected(hidden: Tensor, index: Tensor | None) -> Tensor:
    """Selects hidden states, [seq, batch, hidden] -> [n, hidden]."""
    flat = hidden.flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)


def _selected_operands(deferred: DeferredLogits, index: Tensor | None) -> Operands:
    hidden, weight = deferred.operands()
    return Operands(_selected(hidden, index), weight)


def _nothing(pairs: Mapping[str, LossPair]) -> Tensor:
    return torch.zeros((), device=next(iter(pairs.values())).numerator.device)


def vocab_parallel(local: Tensor, model: ModelSection, groups: Groups) -> VocabParallelLogits:
    """Returns the distributions to which a rank's columns of the logits, [seq, batch, vocab_local], belong."""
    if rows := model.output.head_rows:
        return VocabParallelLogits(local, None, 0, rows)
    # the padded vocabulary is split evenly
    first_index = groups.tp_rank * local.shape[-1]
    group = groups.tp if groups.layout.tp > 1 else None
    return VocabParallelLogits(local, group, first_index, model.vocab_size)


def term_inputs(
    logits: Logits,
    batch: Microbatch,
    config: Config,
    groups: Groups,
    teacher_logits: DeferredLogits | None = None,
) -> dict[str, TermInputs]:
    """Returns the input of each term's loss function for a sliced microbatch, with whole logits.

    All terms share one softmax; each depth of multi-token prediction has one of its own. `teacher_logits` are shaped
    like `logits.main`.
    """

    def distribution(deferred: DeferredLogits) -> VocabParallelLogits:
        return vocab_parallel(deferred.whole(), config.model, groups)

    student, teacher = distribution(logits.main), None if teacher_logits is None else distribution(teacher_logits)
    context = groups.cp if groups.layout.cp > 1 else None
    packed = None if batch.sequence_ids is None else PackedSequences(batch.sequence_ids, batch.num_sequences)
    sources = None if batch.sources is None else TokenSources(batch.sources, len(config.data.source_names))
    terms = loss_terms(config.loss)
    inputs = {
        term: TermInputs(
            student,
            batch.labels,
            batch.weights[term],
            batch.denominator_weights[term],
            batch.tokens,
            teacher,
            context,
            terms.get(term, config.loss).aggregation,  # depths of multi-token prediction use that of the main term
            packed,
            Extras(batch.extras),
            sources if term == MAIN_TERM else None,
        )
        for term in batch.weights
    }
    for depth, (deferred, ahead) in enumerate(zip(logits.mtp, batch.mtp, strict=True), start=1):
        term = depth_term(depth)
        # a separate distribution, which shares nothing with the main logits; extras belong to other tokens
        inputs[term] = replace(
            inputs[term],
            logits=distribution(deferred),
            labels=ahead.labels,
            tokens=ahead.tokens,
            teacher=None,
            extras=Extras(),
        )
    return inputs
