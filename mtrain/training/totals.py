"""Denominators planned before the forward pass, and their comparison with those that the loss functions counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mtrain.base.errors import NonFiniteError, NumericError
from mtrain.data.batch import Microbatch
from mtrain.loss.router import ROUTER_TERMS, router_denominator
from mtrain.loss.scaling import check_denominator
from mtrain.mcore.engine.loss_reduction import TermTotals, TokenCounts

_WEIGHT_TOLERANCE = 1e-12
"""Relative difference allowed between planned and measured denominators: rounding of float64 sums of fractional
weights. Counts are below 1e12, where this means equality."""


def planned_denominators(batches: Sequence[Microbatch], terms: Sequence[str]) -> dict[str, float]:
    """Returns each term's denominator over this data-parallel rank's full rows, known before the forward pass."""
    padding = [batch.is_padding for batch in batches if batch.is_padding is not None]
    ids = [batch.sequence_ids for batch in batches]
    return {
        term: router_denominator(ROUTER_TERMS[term], padding, ids)
        if term in ROUTER_TERMS
        else math.fsum(batch.denominator_weights[term].numpy().sum() for batch in batches)
        for term in terms
    }


def token_counts(batches: Sequence[Microbatch]) -> TokenCounts:
    """Sums the token counts of full rows, as the loader counted them."""
    return TokenCounts(
        padding=sum(batch.num_padding_tokens for batch in batches),
        loss=sum(batch.num_loss_tokens for batch in batches),
        pairs=sum(batch.num_pairs for batch in batches),
        window_pairs=sum(batch.num_window_pairs for batch in batches),
        outputs=sum(batch.num_output_rows for batch in batches),
    )


def check_totals(terms: Mapping[str, TermTotals], compare_with_plan: bool) -> None:
    """Raises NumericError if a total cannot be right; the totals are the same on all ranks, so all raise."""
    for term, totals in terms.items():
        # before the comparison with the plan, which a nan would pass
        if not (math.isfinite(totals.denominator) and totals.denominator >= 0):
            raise NumericError(
                f"the denominator of loss term {term!r} is {totals.denominator}, but must be finite and not negative; "
                "look at the sample weights of the data"
            )
        if not math.isfinite(totals.numerator):
            raise NonFiniteError(f"the loss of term {term!r} is {totals.numerator}")
        difference = abs(totals.denominator - totals.planned)
        # if the plan is 0, only 0 agrees
        if compare_with_plan and difference > _WEIGHT_TOLERANCE * abs(totals.planned):
            raise NumericError(
                f"the denominator of loss term {term!r} was measured as {totals.denominator!r}, but the batch planned "
                f"{totals.planned!r}: a loss function counts other tokens than its mask says; set "
                "loss.denominator=measured if the mask depends on model outputs"
            )
        check_denominator(term, totals.denominator)
