"""Conversion of other programs' values, possibly texts, to values of our keys."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_origin

from pydantic_core import PydanticUndefined

from mtrain.base.yaml_text import read_yaml
from mtrain.config.keys import alternatives
from mtrain.config.kinds import sections_at

_TRUE = frozenset(("true", "t", "yes", "y", "on", "1"))
_FALSE = frozenset(("false", "f", "no", "n", "off", "0"))


def boolean(value: Any) -> bool:
    """Reads true or false as Hugging Face's argument parser does.

    Raises:
        ValueError: The value is neither.
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{value!r} is neither true nor false")
    return text in _TRUE


def number(value: Any) -> int | float:
    """Reads a number; false is 0, as in Hugging Face's argument parser, and a text of digits is an int.

    Raises:
        ValueError: The value is not a number.
    """
    if isinstance(value, str):
        return int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, int | float) and value is not True:
        return value + 0
    raise ValueError(f"{value!r} is not a number")


def listed(value: Any) -> list[Any]:
    """Returns a list, wrapping a single value."""
    return value if isinstance(value, list) else [value]


def is_same(value: Any, other: Any) -> bool:
    """Says whether two values are equal; a text may stand for a number or a switch, a tuple for a list."""
    if isinstance(other, list | tuple):
        return list(value if isinstance(value, list | tuple) else [value]) == list(other)
    try:
        if isinstance(other, bool) and not isinstance(value, float):
            return boolean(value) == other
        if isinstance(other, int | float):
            return number(value) == other
    except ValueError:
        return False
    return bool(value == other)


@cache
def _field(key: str) -> tuple[frozenset[type], Any]:
    """Returns the plain types of our key, and its default; no types for a name of the user's."""
    *parents, name = key.split(".")
    for section in sections_at(tuple(parents)):
        if name in section.model_fields:
            info = section.model_fields[name]
            return frozenset(_plain_types(info.annotation)), info.get_default(call_default_factory=True)
    return frozenset(), PydanticUndefined


def _plain_types(annotation: Any) -> Iterator[type]:
    for member in alternatives(annotation):
        if get_origin(member) is Literal:
            yield str
        elif member is not type(None):
            yield member if member in (int, float, bool, str) else object


def default_of(key: str) -> Any:
    """Returns the default of our key; without one, PydanticUndefined, which equals no value."""
    return _field(key)[1]


def fitting(key: str, value: Any) -> Any:
    """Converts a value to the type of our key, such as a number from text.

    Raises:
        ValueError: The value cannot be converted.
    """
    plain = _field(key)[0]
    if plain == {bool}:
        return boolean(value)
    if plain and plain <= {int, float}:
        parsed = number(value)
        if float not in plain:
            return int(parsed) if parsed == int(parsed) else parsed
        return parsed if int in plain else float(parsed)
    if plain == {str} and not isinstance(value, str):
        if isinstance(value, bool | list | dict):
            raise ValueError(f"{value!r} is not text")
        return str(value)
    return value


def scalar(text: str) -> Any:
    """Reads a command-line value as YAML: a number, true, null or a text."""
    try:
        return read_yaml(text).content
    except ValueError:
        return text


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns a mapping, which may be JSON text.

    Raises:
        ValueError: The value is neither.
    """
    found = scalar(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise ValueError(f"{value!r} is not a mapping")
    return found


def stages_of(text: str) -> list[int] | None:
    """Returns the layers of each stage of Megatron-Core's layout of a pipeline, such as `Ett|(tt|)*6ttL`.

    None: a stage has no layer, or the parts besides layers are not in the first and the last stage.
    """
    text = re.sub(r"\(([^()]*)\)\*(\d+)|([^()|])\*(\d+)", _repeated, text.replace(",", ""))
    first, *inner = stages = text.split("|")
    last = inner.pop() if inner else first
    is_plain = re.fullmatch("Et+", first) and re.fullmatch("t+m*L", last) and all(re.fullmatch("t+", s) for s in inner)
    return [stage.count("t") for stage in stages] if len(stages) > 1 and is_plain else None


def _repeated(match: re.Match[str]) -> str:
    return (match[1] or match[3]) * int(match[2] or match[4])


def shares(text: str) -> list[float]:
    """Turns a text such as "949,50,1" into three shares that add up to 1."""
    numbers = [float(part) for part in text.split(",")]
    numbers += [0.0] * (3 - len(numbers))
    return [part / sum(numbers) for part in numbers]
