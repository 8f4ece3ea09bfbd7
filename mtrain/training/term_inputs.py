"""What the loss functions of a run see of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import depth_term
from mtrain.data.batch import Microbatch
from mtrain.data.collate import loss_terms
from mtrain.loss.pair import TermInputs
from mtrain.loss.sequences import PackedSequences
from mtrain.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.model.mtp import Logits
from mtrain.mcore.state.teacher import Teacher

InputsOf = Callable[[Logits, Microbatch], dict[str, TermInputs]]
"""(logits, sliced microbatch) -> what each term's loss function sees."""


def term_inputs_of(
    batches: Sequence[Microbatch], config: Config, groups: Groups, teacher: Teacher | None = None
) -> InputsOf:
    """`term_inputs` for every microbatch of one pass, with the teacher's logits where there is a teacher.

    Args:
        batches: All microbatches of the pass, sliced for context parallelism; a teacher behind a pipeline runs now.
        config: The configuration.
        groups: The process groups.
        teacher: Where a term needs one.
    """
    if teacher is None:
        return lambda logits, batch: term_inputs(logits, batch, config, groups)
    teacher_logits = teacher.logits_of(batches)
    return lambda logits, batch: term_inputs(logits, batch, config, groups, teacher_logits(batch))


def term_inputs(
    logits: Logits, batch: Microbatch, config: Config, groups: Groups, teacher_logits: Tensor | None = None
) -> dict[str, TermInputs]:
    """What each term's loss function sees of a sliced microbatch; the softmax is computed once for all, and once more
    for each depth of multi-token prediction.

    Args:
        logits: Of the last stage.
        batch: The microbatch, sliced for context parallelism.
        config: The vocabulary's real size.
        groups: Of the vocabulary's other parts and of the sequences' other tokens.
        teacher_logits: Shaped as `logits.main`, where a term needs them.
    """
    group = groups.tp if groups.layout.tp > 1 else None
    # the padded vocabulary is cut evenly, so every rank has as many columns
    first_index = groups.tp_rank * logits.main.shape[-1]

    def distribution(local: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits(local, group, first_index, config.model.vocab_size)

    student, teacher = distribution(logits.main), None if teacher_logits is None else distribution(teacher_logits)
    context = groups.cp if groups.layout.cp > 1 else None
    packed = None if batch.sequence_ids is None else PackedSequences(batch.sequence_ids, batch.num_sequences)
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
        )
        for term in batch.weights
    }
    for depth, (local, ahead) in enumerate(zip(logits.mtp, batch.mtp, strict=True), start=1):
        term = depth_term(depth)
        # a distribution of its own: nothing found for the main logits may be used again here
        inputs[term] = replace(
            inputs[term], logits=distribution(local), labels=ahead.labels, tokens=ahead.tokens, teacher=None
        )
    return inputs
