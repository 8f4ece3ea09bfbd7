"""Largest values of keys, each with the reason that its message gives.

Without them a typing error (10^12 for 10^2) would pass the checks and end in a traceback or a hang.
"""

import math
from typing import Any

from pydantic import AfterValidator

FLOAT32_LARGEST = (2 - 2**-23) * 2.0**127
FLOAT32_SMALLEST = 2.0**-126
"""Smallest positive float32 with full precision."""
INT64_LARGEST = 2**63 - 1


def at_most(limit: int, reason: str) -> AfterValidator:
    """Builds an upper bound for an integer key; None passes."""

    def check(value: Any) -> Any:
        if value is not None and value > limit:
            raise ValueError(f"a number of at most {limit:,} is needed ({reason}), but {shown(value)} was given")
        return value

    return AfterValidator(check)


LAYERS = at_most(4096, "every stage's part of them is planned one by one")
WIDTH = at_most(2**20, "a square matrix of that size takes 4 TiB in float32")
VOCABULARY = at_most(2**31 - 1, "corpora hold tokens as 32-bit integers")
POSITIONS = at_most(2**24, "float32, in which positions become angles, does not distinguish larger ones")
EXPERTS = at_most(2**16, "every token has a score for each of them")
BATCH = at_most(2**24, "so that the tokens of a step are counted exactly")
PIXELS = at_most(2**28, "the patches of an image of more pixels take over 2 GiB")
STEPS = at_most(2**31 - 1, "so that samples have 64-bit numbers")
SAMPLES = at_most(2**31 - 1, "validating more would take longer than any run")
SEED = at_most(2**64 - 1, "seeds have 64 bits")
MAX_SECONDS = 30 * 24 * 3600
SECONDS = at_most(MAX_SECONDS, "a month: nobody would notice a hang")
BATCHES_AHEAD = at_most(1024, "each is a whole global batch in memory")


_LONGEST_NAME = 255
_LONGEST_PATH = 3000
"""Longest path in bytes; systems accept 4096, which must also hold the file names below a run folder."""


def can_be_a_path(text: str) -> bool:
    """Says whether common systems accept this file or folder name."""
    sizes = [len(name.encode(errors="replace")) for name in text.split("/")]
    return "\0" not in text and max(sizes) <= _LONGEST_NAME and sum(sizes) + len(sizes) <= _LONGEST_PATH


def _check_path(value: str | None) -> str | None:
    if value is not None and not can_be_a_path(value):
        raise ValueError(
            f"no file or folder can have this name of {len(value):,} characters; a name has at most {_LONGEST_NAME} "
            f"bytes, and a path {_LONGEST_PATH:,}"
        )
    return value


PATH = AfterValidator(_check_path)


def representable(value: Any) -> Any:
    """Returns the value; refuses floats beyond float32 and integers beyond 64 bits.

    Raises:
        ValueError: The value, or an element of a tuple, is out of range.
    """
    match value:
        case float() if not (
            value == 0 or FLOAT32_SMALLEST <= abs(value) <= FLOAT32_LARGEST or not math.isfinite(value)
        ):
            raise ValueError(
                f"0 or a number from {FLOAT32_SMALLEST:.3g} to {FLOAT32_LARGEST:.3g} is needed (the range of float32, "
                f"in which it is used), but {value} was given"
            )
        case int() if abs(value) > 2**64 - 1:
            raise ValueError(f"a number of at most 64 bits is needed, but {shown(value)} was given")
        case tuple():
            for element in value:
                representable(element)
    return value


def shown(number: int) -> str:
    """Formats an integer for a message: long ones by magnitude."""
    if abs(number) < 10**20:
        return str(number)
    return f"about {'-' if number < 0 else ''}2^{abs(number).bit_length() - 1}"
