"""z-loss: keeps the logarithm of the softmax's denominator near 0, so that logits do not drift."""

import torch

from mtrain.loss.pair import LossPair, TermInputs, per_token, weigh


@per_token
def z_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the squared log-sum-exp of each token's logits, in nats squared.

    Two all-reduces over the tensor-parallel group; none if a next-token loss of the same logits is computed first.

    Source: PaLM (Chowdhery et al. 2022), section 5, where the coefficient is 1e-4.
    """
    logsumexp = inputs.logits.logsumexp()
    # where before the square: its backward multiplies by its input, and a masked inf or nan times 0 is nan
    return weigh(torch.where(inputs.weights != 0, logsumexp, 0.0).square(), inputs)
