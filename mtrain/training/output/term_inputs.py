"""Inputs of the loss functions for a microbatch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import depth_term
from mtrain.config.schema.model import ModelSection
from mtrain.data.batch import Microbatch
from mtrain.data.collate import loss_terms
from mtrain.loss.pair import MAIN_TERM, Extras, TermInputs
from mtrain.loss.sequences import PackedSequences, TokenSources
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model.output_layer import DeferredLogits, Logits


def vocab_parallel(local: Tensor, model: ModelSection, groups: Groups) -> VocabParallelLogits:
    """Returns the distributions to which a rank's columns of the logits belong.

    Args:
        local: Logits of this rank, [seq, batch, vocab_local].
        model: Architecture with the real size of the vocabulary.
        groups: Process groups, among them the group that holds the other columns.
    """
    if model.num_labels is not None:  # a head, which every rank has whole
        return VocabParallelLogits(local, None, 0, model.num_labels)
    # the padded vocabulary is split evenly, so every rank has as many columns
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

    All terms share one softmax; each depth of multi-token prediction has one of its own.

    Args:
        logits: Output of the last stage.
        batch: Microbatch, sliced for context parallelism.
        config: Configuration with the real size of the vocabulary.
        groups: Process groups of the vocabulary's other columns and of the sequences' other tokens.
        teacher_logits: Logits of the teacher, shaped like `logits.main`; needed if a term compares with them.
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
