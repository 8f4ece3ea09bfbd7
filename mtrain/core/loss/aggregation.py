"""Aggregations as per-token weights and shares of the denominator, computed on whole sequences.

For mask w_t, n = sum of w_t, sample weight v, a constant length L and a constant power p (sums of v are over the global
batch):

    name                     weight of a token   denominator
    token-mean               v w_t               sum of v w_t
    seq-mean-token-sum       v w_t               sum of v
    seq-mean-token-mean      v w_t / n           sum of v
    seq-mean-token-sum-norm  v w_t / L           sum of v
    token-sum-norm           v w_t / L           1
    seq-mean-token-sqrt      v w_t / sqrt(n)     sum of v sqrt(n)
    seq-mean-token-power     v w_t / n^p         sum of v n^(1 - p)
    sum                      v w_t               1

The first token of a sequence carries the share of the whole sequence, and the first token of the step's first sequence
carries a constant denominator of 1. So each share has one owner, however rows are cut and distributed.
"""

import math
from typing import NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray

from mtrain.config.schema.loss import TermSection


class TokenTerms(NamedTuple):
    """Weights and shares of one loss term for one sequence."""

    weights: NDArray[np.float32]
    """Factor of each token's loss, [seq]."""
    denominator_weights: NDArray[np.float64]
    """Share of each token in the denominator, [seq]."""


def aggregate(mask: NDArray[np.float64], sample_weight: float, term: TermSection, is_first_in_step: bool) -> TokenTerms:
    """Computes the weights and shares of one whole sequence.

    Computes in float64, and rounds the weights once to float32.

    Args:
        mask: Mask w_t >= 0 of the sequence, [seq].
        sample_weight: Weight v >= 0 of the sample.
        is_first_in_step: Whether this is slot 0 of the global batch (or of the validation set).
    """
    # float64, since planned and measured denominators, both sums of these shares, are compared with each other
    counted = sample_weight * mask.astype(np.float64)
    if term.aggregation == "token-mean":
        return TokenTerms(counted.astype(np.float32), counted)
    total = math.fsum(mask)  # rounded once, so independent of the order of summation
    shares = np.zeros(mask.shape, np.float64)
    shares[0] = _share(total, sample_weight, term, is_first_in_step)
    return TokenTerms((counted / _divisor(total, term)).astype(np.float32), shares)


def _divisor(total: float, term: TermSection) -> float:
    match term.aggregation:
        case "token-mean" | "seq-mean-token-sum" | "sum":
            return 1.0
        # if total is 0, so is every weight: the divisor 1.0 only keeps 0 / 0 (nan) out
        case "seq-mean-token-mean":
            return total if total > 0 else 1.0
        case "seq-mean-token-sqrt":
            return math.sqrt(total) if total > 0 else 1.0
        case "seq-mean-token-power":
            return math.pow(total, _power(term)) if total > 0 else 1.0
        case "seq-mean-token-sum-norm" | "token-sum-norm":
            assert term.norm_length is not None  # a rule of the section
            return float(term.norm_length)
        case _:
            assert_never(term.aggregation)


def _share(total: float, sample_weight: float, term: TermSection, is_first_in_step: bool) -> float:
    """Returns the share of one sequence in the denominator."""
    assert term.aggregation != "token-mean", "shares of token-mean belong to tokens, not to sequences"
    match term.aggregation:
        case "sum" | "token-sum-norm":
            # slot 0 carries the constant divisor of the whole batch
            return 1.0 if is_first_in_step else 0.0
        case "seq-mean-token-sqrt":
            # n / sqrt(n), the sum of the token weights; 0 for an empty sequence
            return sample_weight * math.sqrt(total)
        case "seq-mean-token-power":
            # a rule of the section ensures 1 - p > 0, so an empty sequence adds 0 (0 ** 0 would be 1)
            return sample_weight * math.pow(total, 1 - _power(term))
        case "seq-mean-token-sum" | "seq-mean-token-mean" | "seq-mean-token-sum-norm":
            return sample_weight if total > 0 or _counts_empty(term) else 0.0
        case _:
            assert_never(term.aggregation)


def _counts_empty(term: TermSection) -> bool:
    match term.empty_sequences:
        case "include":
            return True
        case "exclude":
            return False
        case _:
            assert_never(term.empty_sequences)


def _power(term: TermSection) -> float:
    assert term.length_power is not None  # a rule of the section
    return term.length_power
