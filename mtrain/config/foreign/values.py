"""Values of other programs, possibly texts, as values of our keys."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_origin

from pydantic_core import PydanticUndefined

from mtrain.base.yaml_text import read_yaml
from mtrain.config.keys import alternatives
from mtrain.config.kinds import sections_at

_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))


def boolean(value: Any) -> bool:
    """Reads true or false like argument classes of Python programs.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{value!r} is neither true nor false")
    return text in _TRUE


def number(value: Any) -> int | float:
    """Reads a number; false is 0, as for argument classes, and integral numbers are int.

    Raises:
        ValueError: It is not a number.
    """
    if isinstance(value, str):
        return int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, int | float) and value is not True:
        return value + 0
    raise ValueError(f"{value!r} is no number")


def listed(value: Any) -> list[Any]:
    """Returns a list, wrapping a single value."""
    return value if isinstance(value, list) else [value]


def is_same(value: Any, other: Any) -> bool:
    """Says whether two values are equal, also as text, or as a tuple instead of a list."""
    if isinstance(other, list | tuple):
        return list(value if isinstance(value, list | tuple) else [value]) == list(other)
    try:
        if isinstance(other, bool):
            return boolean(value) == other
        if isinstance(other, int | float):
            return number(value) == other
    except ValueError:
        return False
    return bool(value == other)


@cache
def _field(key: str) -> tuple[frozenset[type], Any]:
    """Returns the plain types of our key, and its default; none for names of the user's own."""
    *parents, name = key.split(".")
    for section in sections_at(tuple(parents)):
        if name in section.model_fields:
            info = section.model_fields[name]
            return frozenset(_plain_types(info.annotation)), info.get_default(call_default_factory=True)
    return frozenset(), PydanticUndefined


def _plain_types(annotation: Any) -> Iterator[type]:
    for each in alternatives(annotation):
        if get_origin(each) is Literal:
            yield str
        elif each is not type(None):
            yield each if each in (int, float, bool, str) else object


def default_of(key: str) -> Any:
    """Returns the default of our key; without one, something that equals nothing."""
    return _field(key)[1]


def fitting(key: str, value: Any) -> Any:
    """Converts a value to the type of our key, such as a number from text.

    Raises:
        ValueError: It cannot be converted.
    """
    plain = _field(key)[0]
    if plain == {bool}:
        return boolean(value)
    if plain and plain <= {int, float}:
        found = number(value)
        if float not in plain:
            return int(found) if found == int(found) else found
        return found if int in plain else float(found)
    if plain == {str} and not isinstance(value, str):
        if isinstance(value, bool | list | dict):
            raise ValueError(f"{value!r} is no text")
        return str(value)
    return value


def scalar(text: str) -> Any:
    """Reads a command-line value like YAML: a number, true, null or a text."""
    try:
        return read_yaml(text).content
    except ValueError:
        return text


def shares(text: str) -> list[float]:
    """Turns "949,50,1" into three shares of 1."""
    numbers = [float(each) for each in text.split(",")]
    numbers += [0.0] * (3 - len(numbers))
    return [each / sum(numbers) for each in numbers]
