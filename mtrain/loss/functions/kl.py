"""Divergence from a reference policy, estimated from the log-probabilities of the sampled tokens alone."""

from typing import Literal, assert_never

import torch

from mtrain.loss.pair import LossPair, TermInputs, needs_extras, per_token, weigh


@per_token
@needs_extras("ref_logprobs")
def kl_loss(inputs: TermInputs, estimator: Literal["k1", "k2", "k3"] = "k3") -> LossPair:
    """Weighs and sums an estimate of KL(model || reference) of each token, in nats.

    Where all logits of the reference are available, `distillation` computes the exact divergence.

    Args:
        inputs: One microbatch. The extra `ref_logprobs` has the reference's log-probabilities of the labels.
        estimator: Estimator of the divergence. Where d = log pi - log pi_ref, k1 is d (its gradient has expectation 0
            under the policy's own tokens), k2 is d^2 / 2, and k3 is exp(-d) - 1 + d, which GRPO uses.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    difference = -inputs.logits.cross_entropy(inputs.labels) - inputs.extras["ref_logprobs"]
    # where before exp and square: the gradient of a masked inf would be nan
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
