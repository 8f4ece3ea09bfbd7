"""Diagnostics that a loss function reports with its pair: means and maxima over tokens, without a gradient.

Like a loss, a mean travels as two sums, (numerator, denominator) in one tensor of shape [2], and is divided once at the
end; a maximum is a scalar. Both are combined over chunks, microbatches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.loss.pair import LossPair, TermInputs

Function = TypeVar("Function", bound=Callable[..., LossPair])


@dataclass(frozen=True)
class Reported:
    """Names of the diagnostics that a loss function declares."""

    means: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()


def reports(*means: str, maxima: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Marks a loss function whose pairs have these diagnostics for every microbatch.

    The names appear in `StepResult.diagnostics` and in the records of a run; those of a side term as `term/name`.
    """

    def marked(function: Function) -> Function:
        function.__dict__["reports"] = Reported(means, tuple(maxima))
        return function

    return marked


def diagnosed(
    pair: LossPair, inputs: TermInputs, means: Mapping[str, Tensor], maxima: Mapping[str, Tensor] | None = None
) -> LossPair:
    """Returns the pair with diagnostics over the tokens whose weight is not 0, each of which counts once.

    Args:
        pair: Pair of the same tokens.
        inputs: Microbatch whose weights say which tokens count.
        means: Values by name, [batch, seq]; the mean over tokens is reported.
        maxima: Values by name, [batch, seq]; the largest is reported.
    """
    counted = inputs.weights != 0
    made = {name: mean_of(torch.where(counted, values.detach(), 0.0), counted) for name, values in means.items()}
    for name, values in (maxima or {}).items():
        # max() of no elements raises, and a microbatch may have no tokens
        kept = torch.where(counted, values.detach(), -math.inf).double().flatten()
        made[name] = torch.cat([kept, kept.new_full((1,), -math.inf)]).max()
    return replace(pair, diagnostics={**pair.diagnostics, **made})


def mean_of(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Returns both sums, [2] float64: a mean to which other ranks can add their sums."""
    return torch.stack([numerators.detach().sum(dtype=torch.float64), denominators.detach().sum(dtype=torch.float64)])


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Combines a diagnostic of two parts of a batch: adds sums, keeps the larger of two maxima."""
    return one + other if one.ndim else torch.maximum(one, other)


def shown_name(term: str, name: str) -> str:
    """Returns the name of a term's diagnostic as it appears in records."""
    return name if term == MAIN_TERM else f"{term}/{name}"
