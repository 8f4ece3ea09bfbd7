"""Denominators planned before the forward pass, and checks of the totals measured by the loss functions.

Gradients of sums of weight x loss are about as large as D until they are divided by it. Below 2^-126 float32 and bf16
lose digits one by one, bf16 first. Measured against float64 on the model of the parity tests: at D = 2e-36 a bf16
gradient is lost entirely and a float32 gradient is off by 2e-5, although loss and denominator look right; at D = 1e-30
neither loses anything. 1/D itself overflows below 3e-39.
"""

import math
from collections.abc import Mapping, Sequence

from mtrain.base.errors import NonFiniteError, NumericError
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import TermTotals, TokenCounts
from mtrain.core.loss.router import ROUTER_TERMS, router_denominator

SMALLEST_DENOMINATOR = 2.0**-100
"""Smallest denominator allowed, 7.9e-31: even 2^-26 of an undivided gradient is a normal number."""
LARGEST = 2.0**126
"""Largest denominator or factor allowed, 8.5e37: its inverse is the smallest normal float32 number."""


def check_denominator(term: str, denominator: float) -> None:
    """Raises NumericError for a denominator at which gradients lose digits; 0, by which nothing is divided, passes."""
    # as not (a <= D <= b), so that nan, which compares false, is refused along with negative values
    if denominator != 0 and not SMALLEST_DENOMINATOR <= denominator <= LARGEST:
        raise NumericError(
            f"the denominator of loss term {term!r} is {denominator}, but must lie between {SMALLEST_DENOMINATOR:.2g} "
            f"and {LARGEST:.2g}, because gradients lose digits outside; multiply all sample weights of the data by one "
            "number, which changes nothing else"
        )


def check_factors(coefficients: Mapping[str, float], denominators: Mapping[str, float]) -> None:
    """Raises NumericError if float32 cannot represent a side term's factor in backward, c x D_main / D_k."""
    main = denominators[MAIN_TERM]
    for term, coefficient in coefficients.items():
        # in float64 from the all-reduced totals: all ranks hold the same bits and refuse together
        factor = 0.0 if denominators[term] == 0 else coefficient * (main / denominators[term])
        if factor != 0 and not 1 / LARGEST <= abs(factor) <= LARGEST:
            raise NumericError(
                f"loss term {term!r} has the factor {factor} = {coefficient} x {main} / {denominators[term]} "
                f"(coefficient x main denominator / its own), which must lie between {1 / LARGEST:.2g} and "
                f"{LARGEST:.2g}; bring the sample weights or aggregations of the two terms closer together"
            )


_WEIGHT_TOLERANCE = 1e-12
"""Relative difference allowed between planned and measured denominators, which are float64 sums of fractional weights.
For counts, which stay below 1e12, it means equality."""


def planned_denominators(batches: Sequence[Microbatch], terms: Sequence[str]) -> dict[str, float]:
    """Returns the denominator of each term over the full rows of this data-parallel rank."""
    padding = [batch.is_padding for batch in batches if batch.is_padding is not None]
    ids = [batch.sequence_ids for batch in batches]
    return {
        term: router_denominator(ROUTER_TERMS[term], padding, ids)
        if term in ROUTER_TERMS
        else math.fsum(batch.denominator_weights[term].numpy().sum() for batch in batches)
        for term in terms
    }


def token_counts(batches: Sequence[Microbatch]) -> TokenCounts:
    """Sums the token counts of full rows."""
    grids = [grid for batch in batches if batch.images is not None for grid in batch.images.grids.tolist()]
    return TokenCounts(
        padding=sum(batch.num_padding_tokens for batch in batches),
        loss=sum(batch.num_loss_tokens for batch in batches),
        pairs=sum(batch.num_pairs for batch in batches),
        window_pairs=sum(batch.num_window_pairs for batch in batches),
        outputs=sum(batch.num_output_rows for batch in batches),
        patches=sum(map(math.prod, grids)),
        patch_pairs=sum(frames * (rows * columns) ** 2 for frames, rows, columns in grids),
    )


def check_totals(terms: Mapping[str, TermTotals], compare_with_plan: bool) -> None:
    """Raises NumericError if a total cannot be right; totals are the same on all ranks, so all of them raise."""
    for term, totals in terms.items():
        # checked first, since nan would pass the comparison with planned denominators
        if not (math.isfinite(totals.denominator) and totals.denominator >= 0):
            raise NumericError(
                f"the denominator of loss term {term!r} is {totals.denominator}, but must be finite and not negative; "
                "look at the sample weights of the data"
            )
        if not math.isfinite(totals.numerator):
            raise NonFiniteError(f"the loss of term {term!r} is {totals.numerator}")
        difference = abs(totals.denominator - totals.planned)
        if compare_with_plan and difference > _WEIGHT_TOLERANCE * abs(totals.planned):
            raise NumericError(
                f"the denominator of loss term {term!r} was measured as {totals.denominator!r}, but the batch planned "
                f"{totals.planned!r}: a loss function counts other tokens than its mask says; set "
                "loss.denominator=measured if the mask depends on model outputs"
            )
        check_denominator(term, totals.denominator)
