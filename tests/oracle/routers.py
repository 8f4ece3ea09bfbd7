"""What the routers of a run see, and what is made of it: losses and the next biases of the choice. Float64."""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.loss import RouterLossSection


class Seen(NamedTuple):
    """One router."""

    logits: Tensor
    """[..., num_experts]."""
    chosen: Tensor
    """[..., num_experts] bool: where the tokens went."""


Routers = dict[str, Seen]
"""By the name of the router, `decoder.layers.1.mlp.router`."""

_open: list[Routers] = []
_recorders: list[list[float]] = []


@contextlib.contextmanager
def recorded() -> Iterator[Routers]:
    """Collects what the routers see in this block, which runs every layer once."""
    _open.append({})
    try:
        yield _open[-1]
    finally:
        _open.pop()


def note(name: str, logits: Tensor, chosen: Tensor) -> None:
    """Tells the innermost block, if there is one."""
    if _open:
        assert name not in _open[-1]
        _open[-1][name] = Seen(logits, chosen)


def joined(parts: list[Routers]) -> Routers:
    """Documents laid end to end."""
    return {
        name: Seen(torch.cat([part[name].logits for part in parts]), torch.cat([part[name].chosen for part in parts]))
        for name in parts[0]
    }


def z(sequences: list[Routers]) -> Tensor:
    """Sum over routers and tokens of the squared logarithm of the softmax's denominator."""
    return torch.stack(
        [seen.logits.exp().sum(-1).log().square().sum() for each in sequences for seen in each.values()]
    ).sum()


def sequence_balance(sequences: list[Routers], section: ExpertsSection) -> Tensor:
    """Sum over routers and sequences of E x sum over e of f_e P_e (DeepSeek-V3, equations 17 to 20)."""
    return torch.stack([balance(seen.logits, section) for each in sequences for seen in each.values()]).sum()


def balance(logits: Tensor, section: ExpertsSection) -> Tensor:
    """The balancing loss of [tokens, num_experts]."""
    scores = logits.sigmoid() if section.score == "sigmoid" else logits.exp()
    scores = scores / scores.sum(-1, keepdim=True)
    note_margin(scores, distance(scores.detach(), section.top_k))
    last = scores.sort(-1, descending=True).values[:, section.top_k - 1 : section.top_k]
    shares = (scores >= last).double().mean(0) / section.top_k
    return section.num_experts * (shares * scores.mean(0)).sum()


def coefficients(section: RouterLossSection) -> dict[str, float]:
    """Of the terms that are on, by name."""
    both = {"router_z": section.z_coefficient, "router_sequence_balance": section.sequence_balance_coefficient}
    return {name: value for name, value in both.items() if value > 0}


def moved_biases(biases: dict[str, Tensor], sequences: list[Routers], rate: float) -> dict[str, Tensor]:
    """The biases of the choice after a step: up by the rate where an expert had less than the mean, down where more.

    Args:
        biases: By name, `decoder.layers.1.mlp.router.expert_bias`.
        sequences: What the routers saw of each sequence of the global batch.
        rate: Of one step.
    """
    found = {}
    for name, bias in biases.items():
        router = name.removesuffix(".expert_bias")
        counts = torch.stack([each[router].chosen.sum(0) for each in sequences if router in each]).sum(0)
        found[name] = bias + rate * (counts.double().mean() - counts).sign()
    return found


@contextlib.contextmanager
def recorded_margins() -> Iterator[list[float]]:
    """Meanwhile every router and every balancing loss tells how near its tokens came to another choice, in standard
    deviations of what it ranks by.

    A float32 run chooses the same experts if its ranking is wrong by less than half of the smallest.
    """
    seen: list[float] = []
    _recorders.append(seen)
    try:
        yield seen
    finally:
        _recorders.remove(seen)


def note_margin(ranking: Tensor, margin: float) -> None:
    """Tells all open recorders of a choice among [tokens, num_experts] whose nearest other one is `margin` away."""
    for seen in _recorders:
        seen.append(margin / float(ranking.detach().std()))


def distance(values: Tensor, count: int) -> float:
    """The smallest over rows of the `count`-th highest value less the next one."""
    if count == values.shape[-1]:
        return math.inf
    ordered = values.sort(-1, descending=True).values
    return float((ordered[:, count - 1] - ordered[:, count]).min())
