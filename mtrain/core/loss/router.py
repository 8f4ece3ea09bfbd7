"""Losses of a router: how large its logits are, and how evenly it loads its experts.

They are sums over tokens of text, whatever the loss mask says. A balancing loss compares, over some set of tokens, the
share of the choices that went to each expert with the mean of the expert's normalised score:

    E x sum over e of (choices of e / all choices) x (mean over tokens of score_te)

It is 1 if the load is even. Choices are counted, not differentiated. The sum over experts is linear in the scores, so
each token has its own loss once the counts are known.

Source: Switch Transformer (Fedus et al. 2021), section 2.2, and DeepSeek-V3 (2024), equations 17 to 20: the choices are
the top k of the unbiased scores among all experts. ST-MoE (Zoph et al. 2022), section 3, for the z-loss.
"""

from collections.abc import Sequence
from typing import Final, Literal, assert_never, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RouterTerm = Literal["router_z", "router_sequence_balance", "router_microbatch_balance", "router_global_balance"]
Z: Final = "router_z"
SEQUENCE_BALANCE: Final = "router_sequence_balance"
MICROBATCH_BALANCE: Final = "router_microbatch_balance"
GLOBAL_BALANCE: Final = "router_global_balance"
ROUTER_TERMS: dict[str, RouterTerm] = {term: term for term in get_args(RouterTerm)}
"""Router terms by name, to look up names from the configuration."""
_TINY = 1e-20
"""Summand that keeps the sum of sigmoid scores above 0; far smaller than any score."""


def router_denominator(term: RouterTerm, padding: Sequence[Tensor], sequence_ids: Sequence[Tensor | None]) -> float:
    """Returns the denominator of a term: the number of sequences that hold text, or of their tokens.

    `padding` has the positions without text of each microbatch, [batch, seq] bool, full rows on the CPU; `sequence_ids`
    the sequence of each, None where it is the row.
    """
    is_text = [~microbatch.numpy() for microbatch in padding]
    match term:
        case "router_sequence_balance":
            # a sequence of padding alone has no loss
            return float(sum(_num_sequences(text, ids) for text, ids in zip(is_text, sequence_ids, strict=True)))
        case "router_z" | "router_microbatch_balance" | "router_global_balance":
            return float(sum(text.sum() for text in is_text))
        case _:
            assert_never(term)


def _num_sequences(is_text: NDArray[np.bool_], ids: Tensor | None) -> int:
    return int(is_text.any(1).sum()) if ids is None else len(np.unique(ids.numpy()[is_text]))


def squared_logsumexp(logits: Tensor, is_text: Tensor) -> Tensor:
    """Computes the z-loss of each token in nats squared, [seq, batch], from logits [seq, batch, experts]; loss and
    gradient are 0 at padding."""
    kept = torch.where(is_text.unsqueeze(-1), logits, 0.0)  # where before the log: its gradient at inf is nan
    # a second where: the logits that were set to 0 would add (log of the number of experts)^2
    return torch.where(is_text, kept.logsumexp(-1), 0.0).square()


def normalised_scores(logits: Tensor, score: Literal["softmax", "sigmoid"], is_text: Tensor) -> Tensor:
    """Returns scores that add up to 1 for each token of text and are 0 elsewhere, [seq, batch, experts]."""
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
    # rows without text came out uniform above; with 0 they pull on no expert
    return torch.where(is_text.unsqueeze(-1), scores, 0.0)


def choices_by_sequence(scores: Tensor, top_k: int, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Counts how often each expert is among the top k of the tokens of each sequence, [num_sequences, experts] int64.
    Scores are [seq, batch, experts], ids [seq, batch] int64, negative at padding."""
    # unbiased scores without groups, unlike the choice that sends the tokens (docs/explanation/objective.md)
    best = scores.detach().topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    # integers: sums are exact in any order
    counts = torch.zeros(num_sequences, scores.shape[-1], dtype=torch.int64, device=scores.device)
    kept = (chosen & (sequence_ids >= 0).unsqueeze(-1)).to(torch.int64)
    return counts.index_add_(0, sequence_ids.clamp(min=0).flatten(), kept.flatten(0, 1))


def balance_losses(scores: Tensor, choices: Tensor) -> Tensor:
    """Computes the balancing loss of each token, [seq, batch]; their mean over the set of tokens is the loss.
    Normalised scores are [seq, batch, experts], choices counts over the set, [experts], or each token's own."""
    # clamp: a set without text has no choices, and 0 / 0 would be nan; all its scores are 0
    shares = choices.to(scores.dtype) / choices.sum(-1, keepdim=True).clamp(min=1)
    return (scores * shares).sum(-1) * scores.shape[-1]
