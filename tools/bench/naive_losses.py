"""Two usual ways to normalise a loss, as loss functions to compare with the pair.

Both are for layouts of dp x cp ranks only, with `loss.denominator=measured`: their denominators differ from those that
the masks give. The weights of `token-mean` are the masks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.core.loss.pair import LossPair, TermInputs


def mean_of_micro_steps(inputs: TermInputs) -> LossPair:
    """Averages over the tokens of all ranks in each micro-step; micro-steps are averaged. One all-reduce per
    micro-step."""
    total, num_tokens = _sums(inputs)
    everyone = num_tokens.clone()
    dist.all_reduce(everyone)
    return _mean(total, everyone, share=1 / dist.get_world_size())


def mean_of_rank_means(inputs: TermInputs) -> LossPair:
    """Averages over a rank's tokens of one microbatch; the results are averaged over ranks and micro-steps."""
    return _mean(*_sums(inputs), share=1.0)


def _sums(inputs: TermInputs) -> tuple[Tensor, Tensor]:
    """Sums losses and loss tokens on this rank."""
    losses = inputs.logits.cross_entropy(inputs.labels)
    return torch.where(inputs.weights != 0, losses, 0.0).sum(), (inputs.weights != 0).sum(dtype=torch.float64)


def _mean(total: Tensor, num_tokens: Tensor, share: float) -> LossPair:
    """Makes the pair of a mean; it counts as `share` of a micro-step where all means of a global batch are averaged."""
    return LossPair(total / num_tokens.clamp(min=1).float(), torch.tensor(share, dtype=torch.float64))
