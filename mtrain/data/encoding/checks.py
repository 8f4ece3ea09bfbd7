"""What records of every form have in common: known keys, texts and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError


def check_keys(found: dict[str, Any], known: Set[str], ignored: Set[str], place: str = "") -> None:
    """Refuses a key that nobody reads: what is dropped without a word may be what the model should have seen.

    Args:
        found: A record, or an object inside one.
        known: Keys that are read.
        ignored: Keys that are dropped on purpose; a known key is never dropped.
        place: Begins the message, such as "messages[0] "; empty for the record itself.

    Raises:
        DataError: There is such a key.
    """
    unknown = next((key for key in found if key not in known and key not in ignored), None)
    if unknown is not None:
        raise DataError(
            f"{place}has the key {unknown!r}, which is not read; known are {', '.join(sorted(known))}: remove it, or "
            "name it in data.ignore_keys to train without it"
        )


def check_text(text: object, name: str) -> str:
    """The text itself.

    Raises:
        DataError: It is none; `name` stands in the message.
    """
    if text is None:
        raise DataError(f"{name} is null, but must be a text; write it, or remove the line")
    if not isinstance(text, str):
        raise DataError(f"{name} is a {type(text).__name__}, but must be a text; put it in quotes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} holds half a surrogate pair, which is not text; fix the escape sequence") from None
    return text


def check_weight(weight: object, name: str = "'weight'") -> float:
    """The weight as a number.

    Raises:
        DataError: It is not a finite number of at least 0.
    """
    # bool first: True is an int in Python
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise DataError(f"{name} is {weight!r}, but must be a finite number of at least 0; change it")
    return float(weight)


def token_extras(record: dict[str, Any], names: Sequence[str], num_tokens: int) -> NDArray[np.float32]:
    """[num_tokens, names]: one number a token; one of the whole sample stands at each of them.

    Whether they are finite is not asked: a reader that knows the place does.

    Args:
        record: Has them under their names.
        names: At least one.
        num_tokens: Of the sample. A list has as many numbers, or one less: without the first token, which nothing
            predicts.

    Raises:
        DataError: One is missing, is no number or list of numbers, or has another length.
    """
    return np.stack([_token_extra(record, name, num_tokens) for name in names], axis=1)


def _token_extra(record: dict[str, Any], name: str, num_tokens: int) -> NDArray[np.float32]:
    if name not in record:
        raise DataError(f"has no {name!r}, which data.extras names; give one number, or one a token")
    given = record[name]
    numbers = given if isinstance(given, list) else [given]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        raise DataError(f"{name!r} is not made of numbers; give one number, or a list of one a token")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf
        values = np.array([float(each) for each in numbers], np.float64).astype(np.float32)
    if not isinstance(given, list):
        return np.full(num_tokens, values[0])
    if len(values) == num_tokens - 1:
        return np.concatenate([np.zeros(1, np.float32), values])
    if len(values) != num_tokens:
        raise DataError(
            f"{name!r} has {len(values)} numbers, but the sample has {num_tokens} tokens; give one number a token, or "
            f"{num_tokens - 1}, without the first"
        )
    return values
