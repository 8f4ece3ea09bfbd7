"""Values of config.json with their exact types: "64", 64.0 and true are not the integer 64."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mtrain.base.errors import DataError

T = TypeVar("T", int, float, bool, str)

_WORDS = {str: "a text", bool: "true or false", int: "an integer", float: "a number", list: "a list", dict: "an object"}
_LONGEST = 60


def value_of(config: Mapping[str, Any], name: str, kind: type[T], default: T | None) -> T | None:
    """Reads a field of the file, or of an object in it; None if it is null.

    A finite integer is a number as well; nothing else is converted.
    """
    # the default replaces only a missing field: null means that the model has no such thing
    value = config.get(name, default)
    if value is None:
        return None
    # type, not isinstance: true is an int in Python; an int beyond 2^1023 may overflow as a float
    if kind is float and type(value) is int and abs(value) <= 2**1023:
        return kind(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise wrong_type(name, value, _WORDS[kind])
    return value


def needed_value(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Reads a field that must not be null."""
    value = value_of(config, name, kind, default)
    if value is None:
        given = "is null" if name in config else "is missing"
        raise DataError(f"config.json: {name} {given}, but {_WORDS[kind]} is needed; correct the file")
    return value


def wrong_type(name: str, value: object, needed: str) -> DataError:
    """Builds the error of a value of another type."""
    # parsed JSON has no other types, so anything else is null
    found = _WORDS.get(type(value), "null")
    return DataError(f"config.json: {name}={shown(value)} is {found}, but {needed} is needed; correct the file")


def shown(value: object) -> str:
    """Formats a value for a message, on one line of limited length."""
    text = repr(value)  # repr escapes line breaks: a message is one line, whatever a damaged file holds
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown_name(name: str) -> str:
    """Formats a field's name, which may be any text in a damaged file; ordinary names stay."""
    return name if name.isidentifier() and len(name) <= _LONGEST else shown(name)
