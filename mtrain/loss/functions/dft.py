"""Dynamic fine-tuning: tokens that the model finds unlikely have less influence."""

import torch

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def dft_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the cross entropy of the labels, each times its own probability as a constant.

    Source: Wu et al. 2025, "On the generalization of SFT", equation 9.
    """
    losses = inputs.logits.cross_entropy(inputs.labels)
    kept = torch.where(inputs.weights != 0, losses, 0.0)
    return weigh((-kept).exp().detach() * kept, inputs)
