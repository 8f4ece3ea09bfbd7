"""What the routers of a run see, and what follows from it: losses and the next biases of the choice, in float64."""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.loss import RouterLossSection


class Seen(NamedTuple):
    """Logits and choices of one router."""

    logits: Tensor
    """[..., num_experts]."""
    chosen: Tensor
    """[..., num_experts] bool: the experts that each token was sent to."""


Routers = dict[str, Seen]
"""What each router saw, by its name, such as `decoder.layers.1.mlp.router`."""

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
    """Adds what a router sees to the innermost block, if there is one."""
    if _open:
        assert name not in _open[-1]
        _open[-1][name] = Seen(logits, chosen)


def joined(parts: list[Routers]) -> Routers:
    """Joins the documents end to end."""
    return {
        name: Seen(torch.cat([part[name].logits for part in parts]), torch.cat([part[name].chosen for part in parts]))
        for name in parts[0]
    }


def z(sequences: list[Routers]) -> Tensor:
    """Returns the sum over routers and tokens of the squared logarithm of the softmax's denominator."""
    return torch.stack(
        [seen.logits.exp().sum(-1).log().square().sum() for each in sequences for seen in each.values()]
    ).sum()


def sequence_balance(sequences: list[Routers], section: ExpertsSection) -> Tensor:
    """Returns the sum over routers and sequences of E x sum over e of f_e P_e (DeepSeek-V3, equations 17 to 20)."""
    return torch.stack([balance(seen.logits, section) for each in sequences for seen in each.values()]).sum()


def balance(logits: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the balancing loss of [tokens, num_experts]."""
    scores = logits.sigmoid() if section.score == "sigmoid" else logits.exp()
    scores = scores / scores.sum(-1, keepdim=True)
    note_margin(scores, distance(scores.detach(), section.top_k))
    last = scores.sort(-1, descending=True).values[:, section.top_k - 1 : section.top_k]
    shares = (scores >= last).double().mean(0) / section.top_k
    return section.num_experts * (shares * scores.mean(0)).sum()


def coefficients(section: RouterLossSection) -> dict[str, float]:
    """Returns the coefficients of the router losses that are on, by name."""
    both = {"router_z": section.z_coefficient, "router_sequence_balance": section.sequence_balance_coefficient}
    return {name: value for name, value in both.items() if value > 0}


def moved_biases(biases: dict[str, Tensor], sequences: list[Routers], rate: float) -> dict[str, Tensor]:
    """Returns the biases of the choice after a step: raised by the rate below the mean count, lowered above it.

    Args:
        biases: Biases by name, such as `decoder.layers.1.mlp.router.expert_bias`.
        sequences: What the routers saw of each sequence of the global batch.
        rate: Size of the move in one step.
    """
    found = {}
    for name, bias in biases.items():
        router = name.removesuffix(".expert_bias")
        counts = torch.stack([each[router].chosen.sum(0) for each in sequences if router in each]).sum(0)
        found[name] = bias + rate * (counts.double().mean() - counts).sign()
    return found


@contextlib.contextmanager
def recorded_margins() -> Iterator[list[float]]:
    """Records how close tokens come to another choice, at every router and balancing loss, in standard deviations of
    the ranked values.

    A float32 run chooses the same experts if its ranking is wrong by less than half of the smallest.
    """
    seen: list[float] = []
    _recorders.append(seen)
    try:
        yield seen
    finally:
        _recorders.remove(seen)


def note_margin(ranking: Tensor, margin: float) -> None:
    """Adds to all open recorders a choice among [tokens, num_experts] whose nearest alternative is `margin` away."""
    for seen in _recorders:
        seen.append(margin / float(ranking.detach().std()))


def distance(values: Tensor, count: int) -> float:
    """Returns the smallest difference, over rows, between the `count`-th highest value and the next one."""
    if count == values.shape[-1]:
        return math.inf
    ordered = values.sort(-1, descending=True).values
    return float((ordered[:, count - 1] - ordered[:, count]).min())
