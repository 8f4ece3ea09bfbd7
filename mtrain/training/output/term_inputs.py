"""What the loss functions of a run see of a microbatch."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import depth_term
from mtrain.data.batch import Microbatch
from mtrain.data.collate import loss_terms
from mtrain.loss.pair import MAIN_TERM, Extras, TermInputs
from mtrain.loss.sequences import PackedSequences, TokenSources
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model.output_layer import DeferredLogits, Logits


def vocab_parallel(local: Tensor, config: Config, groups: Groups) -> VocabParallelLogits:
    """The distributions that a rank's columns of the logits belong to.

    Args:
        local: [seq, batch, vocab_local].
        config: The vocabulary's real size.
        groups: Of the vocabulary's other parts.
    """
    if config.model.num_labels is not None:  # a head, which every rank has whole
        return VocabParallelLogits(local, None, 0, config.model.num_labels)
    # the padded vocabulary is cut evenly, so every rank has as many columns
    first_index = groups.tp_rank * local.shape[-1]
    group = groups.tp if groups.layout.tp > 1 else None
    return VocabParallelLogits(local, group, first_index, config.model.vocab_size)


def term_inputs(
    logits: Logits,
    batch: Microbatch,
    config: Config,
    groups: Groups,
    teacher_logits: DeferredLogits | None = None,
) -> dict[str, TermInputs]:
    """What each term's loss function sees of a sliced microbatch, on whole logits; the softmax is computed once for
    all, and once more for each depth of multi-token prediction.

    Args:
        logits: Of the last stage.
        batch: The microbatch, sliced for context parallelism.
        config: The vocabulary's real size.
        groups: Of the vocabulary's other parts and of the sequences' other tokens.
        teacher_logits: Shaped as `logits.main`, where a term needs them.
    """

    def distribution(deferred: DeferredLogits) -> VocabParallelLogits:
        return vocab_parallel(deferred.whole(), config, groups)

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
            terms.get(term, config.loss).aggregation,  # depths of multi-token prediction: as the main term
            packed,
            Extras(batch.extras),
            sources if term == MAIN_TERM else None,
        )
        for term in batch.weights
    }
    for depth, (deferred, ahead) in enumerate(zip(logits.mtp, batch.mtp, strict=True), start=1):
        term = depth_term(depth)
        # a distribution of its own: nothing found for the main logits may be used again here; extras belong to other
        # tokens
        inputs[term] = replace(
            inputs[term],
            logits=distribution(deferred),
            labels=ahead.labels,
            tokens=ahead.tokens,
            teacher=None,
            extras=Extras(),
        )
    return inputs
