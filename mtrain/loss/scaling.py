"""Which denominators and factors leave the gradients their digits.

Gradients are sums of weight x loss until they are divided by D, so their size is about that of D. Float32 and bf16 have
the same exponents, from 2^-126 to 2^127; below, digits are lost one by one, first in bf16. Measured against float64 on
the model of the parity tests: D = 2e-36 costs a gradient in bf16 everything and one in float32 2e-5, while loss and
denominator look right; D = 1e-30 costs neither of them anything. 1/D itself overflows below 3e-39.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtrain.base.errors import NumericError
from mtrain.loss.pair import MAIN_TERM

SMALLEST_DENOMINATOR = 2.0**-100
"""7.9e-31: a part of 2^-26 of an undivided gradient still has all of its digits."""
LARGEST = 2.0**126
"""8.5e37: its inverse is the smallest float32 number that has all of its digits."""


def check_denominator(term: str, denominator: float) -> None:
    """Refuses what gradients cannot be divided by without losing digits; 0 means that there is nothing to divide.

    Raises:
        NumericError: The denominator lies outside of what float32 carries.
    """
    # not (a <= D <= b): comparisons with nan are false, so nan and negative values are refused as well
    if denominator != 0 and not SMALLEST_DENOMINATOR <= denominator <= LARGEST:
        raise NumericError(
            f"the denominator of loss term {term!r} is {denominator}, but must lie between {SMALLEST_DENOMINATOR:.2g} "
            f"and {LARGEST:.2g}, because gradients lose digits outside; multiply all sample weights of the data by one "
            "number, which changes nothing else"
        )


def check_factors(coefficients: Mapping[str, float], denominators: Mapping[str, float]) -> None:
    """Refuses side terms whose factor c x D_main / D_k, by which they enter one backward pass, float32 does not carry.

    Args:
        coefficients: c by term, the main one first.
        denominators: D of each term over the global batch.

    Raises:
        NumericError: A factor lies outside.
    """
    main = denominators[MAIN_TERM]
    for term, coefficient in coefficients.items():
        # on the host in float64, after the step's one collective: all ranks hold the same bits and refuse together
        factor = 0.0 if denominators[term] == 0 else coefficient * (main / denominators[term])
        if factor != 0 and not 1 / LARGEST <= abs(factor) <= LARGEST:
            raise NumericError(
                f"loss term {term!r} enters with the factor {factor} = {coefficient} x {main} / {denominators[term]} "
                f"(coefficient x main denominator / its own), but must with one between {1 / LARGEST:.2g} and "
                f"{LARGEST:.2g}; bring the sample weights or aggregations of the two terms closer together"
            )
