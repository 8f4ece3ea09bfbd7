"""Losses of a router: how large its logits are, and how evenly it loads its experts.

They are sums over tokens that hold text; what the loss mask says of these plays no role. A balancing loss compares,
over some set of tokens, the share of the choices that fell on each expert with the mean of its normalised score:

    E x sum over e of (choices of e / all choices) x (mean over tokens of score_te)

which is 1 where the load is even. Choices are counted, not differentiated. As the sum over experts is linear in the
scores, each token has a loss of its own once the counts are known, and losses of tokens can be added up anywhere.

Source: Switch Transformer (Fedus et al. 2021), section 2.2, and DeepSeek-V3 (2024), equations 17 to 20: the choices are
the top k of the unbiased scores among all experts. ST-MoE (Zoph et al. 2022), section 3, for the z-loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, assert_never, get_args

import torch
from torch import Tensor

RouterTerm = Literal["router_z", "router_sequence_balance", "router_microbatch_balance", "router_global_balance"]
Z: Final = "router_z"
SEQUENCE_BALANCE: Final = "router_sequence_balance"
MICROBATCH_BALANCE: Final = "router_microbatch_balance"
GLOBAL_BALANCE: Final = "router_global_balance"
ROUTER_TERMS: dict[str, RouterTerm] = {term: term for term in get_args(RouterTerm)}
"""By name, for names that the configuration gives."""
_TINY = 1e-20
"""Keeps the sum of sigmoid scores above 0; far below any of them."""


def router_denominator(term: RouterTerm, padding: Sequence[Tensor]) -> float:
    """What a term is divided by: the sequences that hold text, or their tokens.

    Args:
        term: One of the four names.
        padding: [batch, seq] bool of each microbatch, full rows on the CPU: positions that hold no text.
    """
    # numpy: the plan is made before the first forward pass, while batches are still on the host
    is_text = [~each.numpy() for each in padding]
    match term:
        case "router_sequence_balance":
            # a row of padding alone has no counts and no loss, so it must not be in the denominator either
            return float(sum(each.any(1).sum() for each in is_text))
        case "router_z" | "router_microbatch_balance" | "router_global_balance":
            return float(sum(each.sum() for each in is_text))
        case _:
            assert_never(term)


def squared_logsumexp(logits: Tensor, is_text: Tensor) -> Tensor:
    """The z-loss of each token.

    Args:
        logits: [seq, batch, experts].
        is_text: [seq, batch] bool.

    Returns:
        [seq, batch] nats squared; loss and gradient are 0 where there is no text, whatever the logits are.
    """
    kept = torch.where(is_text.unsqueeze(-1), logits, 0.0)  # where before the log: its gradient at inf is nan
    # a second where: the logits that were set to 0 would add (log of the number of experts)^2
    return torch.where(is_text, kept.logsumexp(-1), 0.0).square()


def normalised_scores(logits: Tensor, score: Literal["softmax", "sigmoid"], is_text: Tensor) -> Tensor:
    """[seq, batch, experts] that add up to 1 for each token of text and are 0 elsewhere."""
    kept = torch.where(is_text.unsqueeze(-1), logits, 0.0)
    match score:
        case "softmax":
            # over all experts, not the chosen ones: every expert's logit gets a gradient
            scores = kept.softmax(-1)
        case "sigmoid":
            scores = kept.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
        case _:
            assert_never(score)
    # rows without text came out uniform above; as 0 they pull on no expert
    return torch.where(is_text.unsqueeze(-1), scores, 0.0)


def choices_by_row(scores: Tensor, top_k: int, is_text: Tensor) -> Tensor:
    """How often each expert is among the top k: [seq, batch, experts] -> [batch, experts] int64."""
    # counted from the unbiased scores and without groups, unlike where the tokens are sent (docs/objective.md)
    best = scores.detach().topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    # integers, so that sums over ranks and microbatches are exact in any order
    return (chosen & is_text.unsqueeze(-1)).sum(0)


def balance_losses(scores: Tensor, choices: Tensor) -> Tensor:
    """The balancing loss of each token.

    Args:
        scores: [seq, batch, experts], normalised.
        choices: [experts] or [batch, experts]: counts over the set of tokens that has to be even.

    Returns:
        [seq, batch]; its mean over that set is the loss.
    """
    # clamp: a set without text has no choices, and 0 / 0 would be nan; all its scores are 0
    shares = choices.to(scores.dtype) / choices.sum(-1, keepdim=True).clamp(min=1)
    # [seq, batch, experts] x [experts] or [batch, experts]: the counts are the same for every token of a set
    return (scores * shares).sum(-1) * scores.shape[-1]
