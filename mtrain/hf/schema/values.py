"""Reads values of config.json with exact types: "64", 64.0 and true are not the integer 64."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mtrain.base.errors import DataError

T = TypeVar("T", int, float, bool, str)

_WORDS = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_LONGEST = 60


def value_of(config: Mapping[str, Any], name: str, kind: type[T], default: T | None) -> T | None:
    """Reads a field of the file, or of an object in it; None if it is null.

    Converts a finite integer to float if `kind` is float, and nothing else.
    """
    # the default replaces only a missing field, because null means that the model lacks the feature
    value = config.get(name, default)
    if value is None:
        return None
    # `type is`, because isinstance accepts true as an int; an int beyond 2^1023 may overflow as a float
    if kind is float and type(value) is int and abs(value) <= 2**1023:
        return kind(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise wrong_type(name, value, _WORDS[kind])
    return value


def needed_value(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Reads a field that must not be null; raises DataError if it is null, absent without a default, or mistyped."""
    value = value_of(config, name, kind, default)
    if value is None:
        reason = "is null" if name in config else "is missing"
        raise DataError(f"config.json: {name} {reason}, but {_WORDS[kind]} is needed; correct the file")
    return value


def wrong_type(name: str, value: object, needed: str) -> DataError:
    """Builds the error for a value of another type than `needed`."""
    # parsed JSON has no further type except null
    actual = _WORDS.get(type(value), "null")
    return DataError(f"config.json: {name}={shown(value)} is {actual}, but {needed} is needed; correct the file")


def shown(value: object) -> str:
    """Formats a value for a message, on one line of limited length."""
    text = repr(value)  # which escapes line breaks, even those of a damaged file
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown_name(name: str) -> str:
    """Formats a field's name for a message; a damaged file may have any text as a name."""
    return name if name.isidentifier() and len(name) <= _LONGEST else shown(name)
