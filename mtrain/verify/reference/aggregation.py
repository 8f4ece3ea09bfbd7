"""Aggregations: how each sequence contributes to the numerator and the denominator of a term.

w_t is the weight of a token, n the sum of w_t over the sequence, v the weight of the sample, l_t the loss of a token; L
and p are constants; sums run over all sequences of the global batch:

    token-mean               sum v w l          / sum v w
    seq-mean-token-sum       sum v (sum w l)    / sum v
    seq-mean-token-mean      sum v (sum w l / n) / sum v
    seq-mean-token-sum-norm  sum v (sum w l / L) / sum v
    token-sum-norm           sum v (sum w l / L)
    seq-mean-token-sqrt      sum v (sum w l / sqrt n) / sum v sqrt n
    seq-mean-token-power     sum v (sum w l / n^p) / sum v n^(1 - p)
    sum                      sum v w l

Sources: verl's agg_loss for the names; InternVL for square averaging and for powers between token and sample averaging.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from mtrain.config.schema.loss import TermSection


@dataclass(frozen=True)
class Divisor:
    """Denominator of a term."""

    shares: tuple[float, ...]
    """Shares of tokens or sequences."""

    @property
    def value(self) -> float:
        """Returns the sum of the shares, rounded once."""
        return math.fsum(self.shares)

    @property
    def is_exact(self) -> bool:
        """Says whether float64 adds the shares without rounding in any order and grouping.

        True if all are whole multiples of a power of two and their sum is below 2^53 of them: then float64 represents
        every partial sum.
        """
        finest = max((share.as_integer_ratio()[1] for share in self.shares), default=1)
        return finest < 2**52 and sum(int(share * finest) for share in self.shares) < 2**53


def token_weights(weights: Tensor, sample_weights: Tensor, term: TermSection) -> Tensor:
    """Returns the factor of each token's loss, [batch, seq] float64, from weights w_t [batch, seq] and v [batch]."""
    totals = weights.sum(1)
    ones = torch.ones_like(totals)
    match term.aggregation:
        case "token-mean" | "seq-mean-token-sum" | "sum":
            divisors = ones
        case "seq-mean-token-mean":
            divisors = torch.where(totals > 0, totals, ones)
        case "seq-mean-token-sqrt":
            divisors = torch.where(totals > 0, totals.sqrt(), ones)
        case "seq-mean-token-power":
            assert term.length_power is not None, "a rule of the section"
            divisors = torch.where(totals > 0, totals**term.length_power, ones)
        case "seq-mean-token-sum-norm" | "token-sum-norm":
            assert term.norm_length is not None, "a rule of the section"
            divisors = ones * term.norm_length
        case _:
            assert_never(term.aggregation)
    return weights * (sample_weights / divisors).unsqueeze(1)


def divisor(weights: Tensor, sample_weights: Tensor, term: TermSection) -> Divisor:
    """Returns the denominator of the term, from weights as in `token_weights`."""
    samples = sample_weights.tolist()
    rows = [math.fsum(row) for row in weights.tolist()]
    match term.aggregation:
        case "token-mean":
            return Divisor(tuple((weights * sample_weights.unsqueeze(1)).flatten().tolist()))
        case "seq-mean-token-sum" | "seq-mean-token-mean" | "seq-mean-token-sum-norm":
            counts_empty = {"include": True, "exclude": False}[term.empty_sequences]
            return Divisor(tuple(v for v, total in zip(samples, rows, strict=True) if total > 0 or counts_empty))
        case "seq-mean-token-sqrt":
            return Divisor(tuple(v * math.sqrt(total) for v, total in zip(samples, rows, strict=True)))
        case "seq-mean-token-power":
            assert term.length_power is not None, "a rule of the section"
            power = 1 - term.length_power
            return Divisor(tuple(v * math.pow(total, power) for v, total in zip(samples, rows, strict=True)))
        case "token-sum-norm" | "sum":
            return Divisor((1.0,))
        case _:
            assert_never(term.aggregation)
