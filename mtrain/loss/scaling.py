"""Range of the denominators and factors with which gradients keep their precision.

Gradients are sums of weight x loss until they are divided by D, so they are about as large as D. Float32 and bf16 have
the same exponents, from 2^-126 to 2^127; below, digits are lost one by one, first in bf16. Measured against float64 on
the model of the parity tests: at D = 2e-36 a gradient in bf16 is lost entirely and one in float32 is off by 2e-5, while
loss and denominator look right; at D = 1e-30 neither loses anything. 1/D itself overflows below 3e-39.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtrain.base.errors import NumericError
from mtrain.loss.pair import MAIN_TERM

SMALLEST_DENOMINATOR = 2.0**-100
"""Smallest denominator, 7.9e-31: even 2^-26 of an undivided gradient is then a normal number with all of its digits."""
LARGEST = 2.0**126
"""Largest denominator or factor, 8.5e37: its inverse is the smallest normal float32 number."""


def check_denominator(term: str, denominator: float) -> None:
    """Refuses a denominator with which gradients lose digits; 0 is accepted: there is nothing to divide.

    Raises:
        NumericError: The denominator is out of range.
    """
    # not (a <= D <= b): comparisons with nan are false, so nan and negative values are refused as well
    if denominator != 0 and not SMALLEST_DENOMINATOR <= denominator <= LARGEST:
        raise NumericError(
            f"the denominator of loss term {term!r} is {denominator}, but must lie between {SMALLEST_DENOMINATOR:.2g} "
            f"and {LARGEST:.2g}, because gradients lose digits outside; multiply all sample weights of the data by one "
            "number, which changes nothing else"
        )


def check_factors(coefficients: Mapping[str, float], denominators: Mapping[str, float]) -> None:
    """Refuses side terms whose factor in the backward pass, c x D_main / D_k, is out of the range of float32.

    Args:
        coefficients: Coefficient c of each term, the main term first.
        denominators: Denominator D of each term over the global batch.

    Raises:
        NumericError: A factor is out of range.
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
