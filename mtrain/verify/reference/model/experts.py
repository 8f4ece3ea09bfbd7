"""Layers of experts and losses of their routers, from their definitions.

Sources: Switch Transformer (Fedus et al. 2021), section 2.2; ST-MoE (Zoph et al. 2022), section 3; DeepSeek-V3 (2024),
equations 12 to 20; auxiliary-loss-free balancing (Wang et al. 2024), algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.loss import RouterLossSection
from mtrain.verify.reference.model.modules import Module, linear, network, norm

Z, SEQUENCE_BALANCE = "router_z", "router_sequence_balance"
GATE = "shared_experts.gate_weight"
"""Gate of shared experts, one row."""
INPUT_SCALE, EXPERT_SCALE = "router.scale", "router.per_expert_scale"
"""Factors of a router's input and of its experts' weights."""


@dataclass(frozen=True)
class Routed:
    """Inputs and choices of one router."""

    name: str
    logits: Tensor
    """[batch, seq, experts]."""
    chosen: Tensor
    """Chosen experts of each token, [batch, seq, experts] bool."""
    is_text: Tensor
    """Positions that count, [batch, seq] bool."""


def experts(part: Module, x: Tensor, is_text: Tensor, seen: list[Routed]) -> Tensor:
    """Returns the output of a layer's experts, [batch, seq, hidden]; appends the router's choices to `seen`."""
    section = part.model.experts
    assert section is not None
    router, changes = f"{part.name}.router", part.changes
    branches = section.branch_norms
    router_input = x
    if branches:  # at unit mean square, times the router's vector, over the square root of its size
        spread = torch.sqrt((x * x).mean(-1, keepdim=True) + part.model.norm_epsilon)
        router_input = x / spread * part.tensor(INPUT_SCALE) / math.sqrt(x.shape[-1])
    logits = _router_logits(part, router_input)
    chosen, weights = routed(logits, part.get("router.expert_bias"), section, changes.chosen.get(router))
    seen.append(Routed(router, logits, chosen, is_text))
    if branches:
        weights = weights * part.tensor(EXPERT_SCALE)
    inner = norm(part.inner("routed_input_norm"), x) if branches else x
    output = torch.zeros_like(x)
    of_rank = section.num_experts // changes.num_partial_sums
    for first in range(0, section.num_experts, of_rank):
        total = torch.zeros_like(x)
        for expert in range(first, first + of_rank):
            rows, positions = chosen[..., expert].nonzero(as_tuple=True)
            result = network(part.inner(f"experts.{expert}"), inner[rows, positions])[1]
            weighted = result * weights[rows, positions, expert, None]
            total = total.index_put((rows, positions), weighted, accumulate=True)
        output = output + (total if changes.num_partial_sums == 1 else total.to(torch.bfloat16).to(total.dtype))
    if branches:
        output = norm(part.inner("routed_output_norm"), output)
    if section.shared_ffn_hidden_size:
        inner = norm(part.inner("shared_input_norm"), x) if branches else x
        shared = network(part.inner("shared_experts"), inner)[1]
        if section.shared_gate:
            shared = shared * torch.sigmoid(inner @ part.tensor(GATE).T)
        output = output + (norm(part.inner("shared_output_norm"), shared) if branches else shared)
    return output


def _router_logits(part: Module, x: Tensor) -> Tensor:
    dtype = part.changes.router_dtype
    if dtype is None:
        return linear(part, "router", x)
    prefix = f"{part.name}.router."
    rounded = {name: tensor.to(dtype).to(x.dtype) for name, tensor in part.tensors.items() if name.startswith(prefix)}
    return linear(replace(part, tensors=rounded), "router", x.to(dtype).to(x.dtype)).to(dtype).to(x.dtype)


def routed(
    logits: Tensor, expert_bias: Tensor | None, section: ExpertsSection, replayed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns chosen experts and their weights, [batch, seq, experts]; the bias affects only the choice.

    `replayed`, [batch, seq, experts] bool, replaces the choice of tokens for which it has any.
    """
    match section.score:
        case "sigmoid":
            scores = torch.sigmoid(logits)
        case "softmax":
            scores = logits.softmax(-1) if section.pre_softmax else logits
        case _:
            assert_never(section.score)
    ranking = (scores if expert_bias is None else scores + expert_bias).detach()
    chosen = _best(_inside_groups(ranking, section), section.top_k)
    if replayed is not None:
        chosen = torch.where(replayed.any(-1, keepdim=True), replayed, chosen)
    if section.score == "sigmoid":
        chosen_scores = scores * chosen
        weights = chosen_scores / chosen_scores.sum(-1, keepdim=True) if section.top_k > 1 else chosen_scores
    elif section.pre_softmax:
        weights = scores * chosen
    else:
        weights = logits.masked_fill(~chosen, -math.inf).softmax(-1)
    return chosen, weights * section.scaling_factor


def _inside_groups(ranking: Tensor, section: ExpertsSection) -> Tensor:
    """Sets the ranking outside the best groups to -inf.

    A group ranks by the sum of its best scores: `group_score_top_k` of them, by default as many as a token takes from
    each chosen group.
    """
    if section.num_groups is None or section.group_top_k is None:
        return ranking
    grouped = ranking.view(*ranking.shape[:-1], section.num_groups, -1)
    count = section.top_k // section.group_top_k if section.group_score_top_k is None else section.group_score_top_k
    best = grouped.sort(-1, descending=True).values[..., :count]
    is_open = _best(best.sum(-1), section.group_top_k)
    return grouped.masked_fill(~is_open.unsqueeze(-1), -math.inf).flatten(-2)


def _best(values: Tensor, count: int) -> Tensor:
    """Marks the `count` highest values of the last axis."""
    order = values.argsort(-1, descending=True)[..., :count]
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, order, True)


def coefficients(section: RouterLossSection) -> dict[str, float]:
    """Returns the coefficients above 0 by term."""
    both = {Z: section.z_coefficient, SEQUENCE_BALANCE: section.sequence_balance_coefficient}
    return {name: value for name, value in both.items() if value > 0}


def router_numerator(term: str, seen: Sequence[Routed], section: ExpertsSection) -> Tensor:
    """Returns the numerator of a term, summed over all routers and over tokens (z) or sequences (balance)."""
    of_one = _z if term == Z else _balance
    return torch.stack([of_one(router, section) for router in seen]).sum()


def router_shares(term: str, is_text: Tensor) -> tuple[float, ...]:
    """Returns each row's share of the denominator: its text tokens (z), or 1 if it has any (balance)."""
    counts = is_text.sum(1).tolist()
    return tuple(float(count if term == Z else count > 0) for count in counts)


def _z(seen: Routed, section: ExpertsSection) -> Tensor:
    return (torch.logsumexp(seen.logits[seen.is_text], -1) ** 2).sum()


def _balance(seen: Routed, section: ExpertsSection) -> Tensor:
    """Sums E x sum over experts of (share of the choices) x (mean score) over sequences."""
    total = seen.logits.new_zeros(())
    for logits, is_text in zip(seen.logits, seen.is_text, strict=True):
        if is_text.any():
            text_logits = logits[is_text]
            scores = {"sigmoid": torch.sigmoid, "softmax": torch.exp}[section.score](text_logits)
            scores = scores / scores.sum(-1, keepdim=True)
            shares = _best(scores.detach(), section.top_k).double().mean(0) / section.top_k
            total = total + section.num_experts * (shares * scores.mean(0)).sum()
    return total


def moved_bias(bias: Tensor, seen: Routed, rate: float) -> Tensor:
    """Returns the expert bias after a step: raised for experts below the mean load, lowered above it."""
    counts = (seen.chosen & seen.is_text.unsqueeze(-1)).sum((0, 1))
    return bias + rate * (counts.sum() - counts * len(counts)).sign().to(bias.dtype)
