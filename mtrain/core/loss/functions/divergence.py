"""Divergences from another model, known by all its logits, its most likely tokens or just the labels."""

from typing import Literal, assert_never

import torch

from mtrain.core.loss.pair import (
    LossPair,
    TermInputs,
    at_temperature,
    needs_extras,
    needs_teacher,
    per_token,
    stacked_extra,
    weigh,
)


@per_token
@needs_teacher
def distillation_loss(
    inputs: TermInputs, direction: Literal["forward", "reverse"] = "forward", temperature: float = 1.0
) -> LossPair:
    """Weighs and sums the divergence between the teacher's and the model's distributions of each token, in nats.

    Two all-reduces over the tensor-parallel group. Labels are not used, but weights are.

    Args:
        inputs: One microbatch, with the teacher's logits.
        direction: forward is KL(teacher || model), which makes the model cover everything that the teacher would say;
            reverse is KL(model || teacher), which keeps the model within it.
        temperature: Divisor of both logits. The gradient shrinks with its square; to compensate, give the term a
            coefficient of temperature squared.

    Source: Hinton et al. 2015; the reverse direction as in Gu et al. 2023 (MiniLLM).
    """
    # no mask here: `weigh` drops masked tokens, and backward sets their gradient to 0
    teacher = inputs.teacher
    assert teacher is not None, "Objective refuses this function without a teacher"
    logits = inputs.logits
    match direction:
        case "forward":
            return weigh(logits.kl_divergence(teacher, temperature), inputs)
        case "reverse":
            return weigh(logits.reverse_kl_divergence(teacher, temperature), inputs)
        case _:
            assert_never(direction)


@per_token
@needs_extras("topk_ids[k]", "topk_logprobs[k]")
def top_k_distillation_loss(inputs: TermInputs, k: int, remainder: Literal["bucket", "drop"] = "bucket") -> LossPair:
    """Weighs and sums KL(teacher || model) of each token, in nats, over k known tokens of the teacher and the rest.

    Up to two all-reduces over the tensor-parallel group, of three numbers per token.

    Args:
        inputs: One microbatch. The extras `topk_ids` and `topk_logprobs` contain k tokens and the teacher's
            log-probabilities of them, from the softmax over its whole vocabulary.
        k: Number of tokens to use from each extra, starting with the first.
        remainder: Treatment of all other tokens. bucket: together they count as one more token, with the remaining
            probability of the teacher and of the model. The loss is 0 exactly if the model agrees with everything known
            about the teacher, and never exceeds the divergence of the whole distributions. drop: the k probabilities
            are divided by their sum, as if the teacher gave all other tokens probability 0; this pushes the model's
            tail towards 0, whatever the teacher has there.

    Source: Hinton et al. 2015; merging outcomes never raises a divergence, Cover and Thomas 2006, section 2.8.
    """
    ids = stacked_extra(inputs, "topk_ids", k).long()
    # float64, since the rest is a difference from 1
    probabilities = stacked_extra(inputs, "topk_logprobs", k).double().exp()
    mass = probabilities.sum(-1, keepdim=True)
    match remainder:
        case "bucket":
            # a mass above 1 is due to rounding; other data have been refused
            known = probabilities / mass.clamp(min=1)
            rest = (1 - known.sum(-1)).clamp(min=0)
            if k >= inputs.logits.vocab_size:  # no other tokens exist, so the rest is rounding
                known, rest = probabilities / mass, torch.zeros_like(rest)
        case "drop":
            known, rest = probabilities / mass, torch.zeros_like(mass[..., 0])
        case _:
            assert_never(remainder)
    return weigh(inputs.logits.top_k_divergence(ids, known, rest), inputs)


@per_token
@at_temperature
@needs_extras("ref_logprobs")
def kl_loss(
    inputs: TermInputs, estimator: Literal["k1", "k2", "k3"] = "k3", temperature: float | None = None
) -> LossPair:
    """Weighs and sums an estimate of KL(model || reference) of each token, in nats.

    If all logits of the reference are available, `distillation` computes the exact divergence.

    Args:
        inputs: One microbatch. The extra `ref_logprobs` contains the reference's log-probabilities of the labels.
        estimator: Estimator of KL. For d = log pi - log pi_ref, k1 is d (its gradient has expectation 0 on tokens
            sampled from the policy), k2 is d^2 / 2, and k3 is exp(-d) - 1 + d, which GRPO uses.
        temperature: Divisor of the logits, which must match that of `ref_logprobs`. None: the temperature of each
            sample in the data, else 1.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    difference = -inputs.logits_at(temperature).cross_entropy(inputs.labels) - inputs.extras["ref_logprobs"]
    # masked before exp and square, since the gradient of a masked inf would be nan
    difference = torch.where(inputs.weights != 0, difference, 0.0)
    match estimator:
        case "k1":
            return weigh(difference, inputs)
        case "k2":
            return weigh(difference.square() / 2, inputs)
        case "k3":
            return weigh((-difference).exp() - 1 + difference, inputs)
        case _:
            assert_never(estimator)
