"""The choice of each token's experts, and their weights."""

from __future__ import annotations

from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection

_EPSILON = 1e-20
"""Added to the sum that sigmoid scores are divided by, as megatron-core and DeepSeek do."""


class TopkRouting(NamedTuple):
    """The experts of each token."""

    weights: Tensor
    """[tokens, num_experts], float32 or float64 like the logits: 0 where an expert was not chosen."""
    chosen: Tensor
    """[tokens, num_experts] bool."""


def choose(logits: Tensor, section: ExpertsSection, expert_bias: Tensor | None) -> TopkRouting:
    """Chooses the top_k best experts of each token.

    Args:
        logits: [tokens, num_experts], float32 or float64.
        section: Section with score, groups, scaling.
        expert_bias: Bias [num_experts], added to the scores for the choice, not to the weights.
    """
    scores = scores_of(logits, section)
    ranking = scores if expert_bias is None else scores + expert_bias.to(scores.dtype)
    # indices have no gradient; weights get theirs from the unbiased scores below
    places = best_places(ranking.detach(), section)
    weights = _normalised(scores.gather(1, places), section) * section.scaling_factor
    return TopkRouting(
        # dense [tokens, num_experts], the form that megatron-core's dispatchers take
        torch.zeros_like(logits).scatter(1, places, weights),
        torch.zeros_like(logits, dtype=torch.bool).scatter(1, places, True),
    )


def scores_of(logits: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the values that rank experts: sigmoid, softmax over all, or logits where the softmax comes after."""
    match section.score:
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1) if section.pre_softmax else logits
        case _:
            assert_never(section.score)


def best_places(ranking: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the indices of the top_k highest: [tokens, num_experts] -> [tokens, top_k] int64.

    With groups, a token chooses among its group_top_k best ones; a group counts by the sum of its num_scored highest.
    By default that is the number of experts that a token would take from each chosen group if it took equally many
    (megatron-core); in DeepSeek-V3 it is always 2 (transformers 5, modeling_deepseek_v3.py).
    """
    if section.num_groups is not None and section.group_top_k is not None:
        grouped = ranking.view(len(ranking), section.num_groups, -1)
        group_scores = grouped.topk(section.num_scored, dim=-1).values.sum(-1)
        groups = group_scores.topk(section.group_top_k, dim=-1).indices
        is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, groups, True)
        # -inf and not 0: biased scores may be negative
        ranking = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    return ranking.topk(section.top_k, dim=-1).indices


def _normalised(scores: Tensor, section: ExpertsSection) -> Tensor:
    """Computes the weights of the chosen experts from their scores, [tokens, top_k]."""
    match section.score:
        case "softmax":
            return scores if section.pre_softmax else scores.softmax(-1)
        case "sigmoid":
            return scores / (scores.sum(-1, keepdim=True) + _EPSILON) if section.top_k > 1 else scores
        case _:
            assert_never(section.score)
