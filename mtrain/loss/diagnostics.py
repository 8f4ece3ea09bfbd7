"""What a loss function reports beside its pair: means and maxima over tokens, which nothing differentiates.

Like a loss they are not averaged where they are made: a mean is two sums, (numerator, denominator) in one tensor of
shape [2], a maximum is a scalar. Both are joined over chunks, microbatches and ranks, and divided once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mtrain.loss.pair import MAIN_TERM, LossPair, TermInputs

Function = TypeVar("Function", bound=Callable[..., LossPair])


@dataclass(frozen=True)
class Reported:
    """What a loss function says that it reports."""

    means: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()


def reports(*means: str, maxima: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Marks a loss function whose pairs have these diagnostics, of every microbatch; its names are then in
    `StepResult.diagnostics` and in the records of a run, those of a side term behind its name: `kl/estimate`.
    """

    def marked(function: Function) -> Function:
        function.__dict__["reports"] = Reported(means, tuple(maxima))
        return function

    return marked


def diagnosed(
    pair: LossPair, inputs: TermInputs, means: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
) -> LossPair:
    """The pair with diagnostics over the tokens of weight other than 0, each of which counts once.

    Args:
        pair: Of the same tokens.
        inputs: Whose weights say which tokens count.
        means: Name -> [batch, seq], averaged over tokens.
        maxima: Name -> [batch, seq], of which the largest counts.
    """
    counted = inputs.weights != 0
    found = {name: mean_of(torch.where(counted, values.detach(), 0.0), counted) for name, values in means.items()}
    for name, values in (maxima or {}).items():
        # a microbatch may have no token at all, of which max() knows no maximum
        kept = torch.where(counted, values.detach(), -math.inf).double().flatten()
        found[name] = torch.cat([kept, kept.new_full((1,), -math.inf)]).max()
    return replace(pair, diagnostics={**pair.diagnostics, **found})


def mean_of(numerators: Tensor, denominators: Tensor) -> Tensor:
    """[2] float64: both summed up, a mean that other ranks can add theirs to."""
    return torch.stack([numerators.detach().sum(dtype=torch.float64), denominators.detach().sum(dtype=torch.float64)])


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Of two parts of a batch: sums are added, of maxima the larger one is kept."""
    return one + other if one.ndim else torch.maximum(one, other)


def shown_name(term: str, name: str) -> str:
    """Of a diagnostic of a term, for people and records."""
    return name if term == MAIN_TERM else f"{term}/{name}"
