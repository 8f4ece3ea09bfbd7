"""pydantic's findings in words: dotted key, what was given, what is needed, what to change."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic_core import ErrorDetails

from mtrain.config.schema.root import Config
from mtrain.config.schema.section import BrokenRulesError, Section

_LONGEST_VALUE = 80
"""Characters of a value that are shown."""
_LONGEST_LINE = 1000
_LONGEST_END = 200
"""Of a longer line, characters that are shown of its end, which says what to change."""
_MOST_LINES = 50

Location = tuple[int | str, ...]


def joined(lines: Iterable[str]) -> str:
    """One message of several lines, as a person can read it: long lines lose their middle, many their rest.

    What no terminal should get, such as an escape sequence in a key, is spelled out.
    """
    shown = [_printable(line) for line in lines]
    if len(shown) > _MOST_LINES:
        shown[_MOST_LINES:] = [f"and {len(shown) - _MOST_LINES} more like these; change the first ones and try again"]
    return "\n".join(shown)


def _printable(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE - _LONGEST_END]} ... {line[-_LONGEST_END:]}"
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def dotted(location: Location) -> str:
    """`data.train[0].path` for ("data", "train", 0, "path")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def readable(detail: ErrorDetails) -> Iterator[str]:
    """Yields one line for each thing that a finding of pydantic says is wrong."""
    key = dotted(detail["loc"])
    error = detail.get("ctx", {}).get("error")
    match detail["type"]:
        case "extra_forbidden":
            yield f"{key}: there is no such key; {_nearest(detail['loc'])}"
        case "missing":
            yield f"{key}: no value is given; set {_required(detail['loc']) or 'it'}"
        case "value_error" if isinstance(error, BrokenRulesError):
            yield from (f"{key}.{message}" if key else message for message in error.messages)
        case "value_error":
            yield f"{key}: {error}; change it"
        case "model_type" | "model_attributes_type":
            yield f"{key}: a section with keys is needed, but {_shown(detail['input'])} was given; change it"
        case _:
            message = detail["msg"][:1].lower() + detail["msg"][1:]
            yield f"{key}: {message}, but {_shown(detail['input'])} was given; change it"


def _required(location: Location) -> str:
    """The keys that a section at `location` cannot do without; empty where there is a value."""
    section = _section_at(Config, location)
    fields = section.model_fields.items() if section else ()
    return ", ".join(dotted((*location, name)) for name, field in fields if field.is_required())


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _nearest(location: Location) -> str:
    """Suggests the nearest valid key of the same section, else of any section, else lists the section's keys."""
    *parents, name = location
    section = _section_at(Config, tuple(parents))
    keys = list(section.model_fields) if section else []
    if near := difflib.get_close_matches(str(name), keys, n=1):
        return f"did you mean {dotted((*parents, near[0]))}?"
    elsewhere = {key: dotted((top, key)) for top in Config.model_fields for key in _keys_of(top)}
    if near := difflib.get_close_matches(str(name), elsewhere, n=1, cutoff=0.8):
        return f"did you mean {elsewhere[near[0]]}?"
    return f"{dotted(tuple(parents)) or 'a configuration'} has {', '.join(keys)}"


def _keys_of(top: str) -> list[str]:
    section = _section_at(Config, (top,))
    return list(section.model_fields) if section else []


def _section_at(section: type[Section], location: Location) -> type[Section] | None:
    """The section class at `location`, where None stands for no section."""
    parts = iter(location)
    for part in parts:
        field = section.model_fields.get(str(part))
        found = _section_in(field.annotation) if field else None
        if field is None or found is None:
            return None
        section = found
        if field.annotation is not found:
            next(parts, None)  # the index in a list of sections, or the name of one
    return section


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _section_in(argument))), None)
