"""Losses of the model's distribution of each token: likelihood, entropy and log-sum-exp."""

import torch

from mtrain.core.loss.pair import LossPair, TermInputs, at_temperature, consumes_logits, per_token, weigh


@per_token
@consumes_logits
def next_token_loss(inputs: TermInputs, label_smoothing: float = 0.0) -> LossPair:
    """Weighs and sums the cross entropy of the labels.

    Two all-reduces over the tensor-parallel group, none if another term of the microbatch has made them.

    Args:
        label_smoothing: Share of the target spread evenly over all real tokens of the vocabulary, without padding; 0 <=
            label_smoothing < 1.
    """
    return weigh(inputs.logits.cross_entropy(inputs.labels, label_smoothing), inputs)


@per_token
@consumes_logits
def dft_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the cross entropy of the labels, each times the label's probability as a constant.

    Tokens that the model finds unlikely have less influence.

    Source: Wu et al. 2025, "On the generalization of SFT", equation 9.
    """
    losses = inputs.logits.cross_entropy(inputs.labels)
    masked_losses = torch.where(inputs.weights != 0, losses, 0.0)
    return weigh((-masked_losses).exp().detach() * masked_losses, inputs)


@per_token
@at_temperature
def entropy_loss(inputs: TermInputs, temperature: float | None = None) -> LossPair:
    """Weighs and sums the entropy of each token's distribution, in nats.

    A negative coefficient rewards high entropy.

    One all-reduce over the tensor-parallel group if a next-token loss of the same logits is computed as well, else two.
    Labels are not used, but weights are: a masked token adds no entropy.

    Args:
        temperature: Divisor of the logits. None: the temperature of each sample in the data, else 1.
    """
    return weigh(inputs.logits_at(temperature).entropy(), inputs)


@per_token
def z_loss(inputs: TermInputs) -> LossPair:
    """Weighs and sums the squared log-sum-exp of each token's logits, in nats squared, to keep logits from drifting.

    Two all-reduces over the tensor-parallel group, none if a next-token loss of the same logits is computed first.

    Source: PaLM (Chowdhery et al. 2022), section 5, where the coefficient is 1e-4.
    """
    logsumexp = inputs.logits.logsumexp()
    # masked before the square, whose backward multiplies by its input: a masked inf or nan times 0 is nan
    return weigh(torch.where(inputs.weights != 0, logsumexp, 0.0).square(), inputs)
