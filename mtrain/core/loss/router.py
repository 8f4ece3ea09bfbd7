"""Router losses, which keep a router's logits small and the load of its experts even.

They are sums over all text tokens, masked or not. A balancing loss compares, over some set of tokens, the share of
choices that went to each expert with the mean of the expert's normalised score:

    E x sum over e of (choices of e / all choices) x (mean over tokens of score_te)

It is 1 for an even load. Choices are counted, not differentiated. The sum over experts is linear in the scores, so each
token has a loss of its own once the counts are known.

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
"""Router terms by name, for look-ups by names in the configuration."""
_TINY = 1e-20
"""Added to the sum of sigmoid scores to keep it above 0; far smaller than any score."""


def router_denominator(term: RouterTerm, padding: Sequence[Tensor], sequence_ids: Sequence[Tensor | None]) -> float:
    """Returns the denominator of a term: the number of sequences with text, or the number of text tokens.

    Args:
        padding: Mask of the positions without text for each microbatch, [batch, seq] bool, full rows on the CPU.
        sequence_ids: Sequence number of each position for each microbatch; None if each row is a sequence.
    """
    is_text = [~microbatch.numpy() for microbatch in padding]
    match term:
        case "router_sequence_balance":
            # a sequence of padding has no loss
            return float(sum(_num_sequences(text, ids) for text, ids in zip(is_text, sequence_ids, strict=True)))
        case "router_z" | "router_microbatch_balance" | "router_global_balance":
            return float(sum(text.sum() for text in is_text))
        case _:
            assert_never(term)


def _num_sequences(is_text: NDArray[np.bool_], ids: Tensor | None) -> int:
    return int(is_text.any(1).sum()) if ids is None else len(np.unique(ids.numpy()[is_text]))


def squared_logsumexp(logits: Tensor, is_text: Tensor) -> Tensor:
    """Computes the z-loss of each token, [seq, batch] in nats squared, from logits [seq, batch, experts]; loss and
    gradient are 0 at padding."""
    text_logits = torch.where(is_text.unsqueeze(-1), logits, 0.0)  # masked before the log, whose gradient at inf is nan
    # masked again: a row of zeros would add log(number of experts)^2
    return torch.where(is_text, text_logits.logsumexp(-1), 0.0).square()


def normalised_scores(logits: Tensor, score: Literal["softmax", "sigmoid"], is_text: Tensor) -> Tensor:
    """Returns scores, [seq, batch, experts], that add up to 1 for each text token and are 0 at padding."""
    text_logits = torch.where(is_text.unsqueeze(-1), logits, 0.0)
    match score:
        case "softmax":
            # over all experts, not just the chosen ones, so that every expert's logit gets a gradient
            scores = text_logits.softmax(-1)
        case "sigmoid":
            scores = text_logits.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
        case _:
            assert_never(score)
    # padding came out uniform above; zeros pull on no expert
    return torch.where(is_text.unsqueeze(-1), scores, 0.0)


def choices_by_sequence(scores: Tensor, top_k: int, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Counts how often each expert is among the top k of a token, by sequence: [num_sequences, experts] int64.

    Scores are [seq, batch, experts]; sequence ids are [seq, batch] int64, negative at padding.
    """
    # by unbiased scores without groups, unlike the dispatch of tokens (docs/explanation/objective.md)
    top_experts = scores.detach().topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, top_experts, True)
    # integers, whose sums are exact in any order
    counts = torch.zeros(num_sequences, scores.shape[-1], dtype=torch.int64, device=scores.device)
    text_choices = (chosen & (sequence_ids >= 0).unsqueeze(-1)).to(torch.int64)
    return counts.index_add_(0, sequence_ids.clamp(min=0).flatten(), text_choices.flatten(0, 1))


def balance_losses(scores: Tensor, choices: Tensor) -> Tensor:
    """Computes the balancing loss of each token, [seq, batch]; the mean over a set of tokens is the loss of the set.

    Scores are normalised, [seq, batch, experts]. Choices are the counts of the set: [experts], or [seq, batch, experts]
    if tokens belong to different sets.
    """
    # a set without text has no choices and only scores of 0; clamp keeps 0 / 0 (nan) out
    shares = choices.to(scores.dtype) / choices.sum(-1, keepdim=True).clamp(min=1)
    return (scores * shares).sum(-1) * scores.shape[-1]
