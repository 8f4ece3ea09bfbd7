"""Distillation from a teacher's most likely tokens, whose log-probabilities were cached."""

from typing import Literal, assert_never

import torch

from mtrain.loss.pair import LossPair, TermInputs, needs_extras, per_token, stacked_extra, weigh


@per_token
@needs_extras("topk_ids[k]", "topk_logprobs[k]")
def top_k_distillation_loss(inputs: TermInputs, k: int, remainder: Literal["bucket", "drop"] = "bucket") -> LossPair:
    """Weighs and sums KL(teacher || model) of each token, in nats, over the k known tokens of the teacher and the rest.

    Up to two all-reduces over the tensor-parallel group, of three numbers per token.

    Args:
        inputs: One microbatch. The extras `topk_ids` and `topk_logprobs` have k tokens and the teacher's
            log-probabilities of them, from the softmax over its whole vocabulary.
        k: Number of tokens of each extra that are used, from the first on.
        remainder: Treatment of all other tokens. bucket: they count together as one more token, with the probability
            that is left in the teacher and in the model. The loss is 0 exactly where the model agrees with all that is
            known of the teacher, and never above the divergence of the whole distributions. drop: the k probabilities
            are divided by their sum, as if the teacher gave all other tokens 0; this pushes the model's own tail
            towards 0, whatever the teacher has there.

    Source: Hinton et al. 2015; merging outcomes never raises a divergence, Cover and Thomas 2006, section 2.8.
    """
    ids = stacked_extra(inputs, "topk_ids", k).long()
    # float64: the rest is a difference from 1
    given = stacked_extra(inputs, "topk_logprobs", k).double().exp()
    mass = given.sum(-1, keepdim=True)
    match remainder:
        case "bucket":
            # above 1 only by rounding: other data were refused
            known = given / mass.clamp(min=1)
            rest = (1 - known.sum(-1)).clamp(min=0)
            if k >= inputs.logits.vocab_size:  # there is no other token, so the rest is rounding
                known, rest = given / mass, torch.zeros_like(rest)
        case "drop":
            known, rest = given / mass, torch.zeros_like(mass[..., 0])
        case _:
            assert_never(remainder)
    return weigh(inputs.logits.top_k_divergence(ids, known, rest), inputs)
