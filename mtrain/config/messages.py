"""Findings of pydantic in words: dotted key, what was given, what is needed, what to change."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import get_origin

from pydantic_core import ErrorDetails

from mtrain.base.spelling import meant, plain
from mtrain.config.keys import separator
from mtrain.config.kinds import kinds_of, sections_at
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import AS_LIST, BrokenRulesError, Section, is_list_or_mapping, sections_in

_LONGEST_VALUE = 80
_LONGEST_LINE = 1000
_LONGEST_END = 200
"""Characters of a long line's end, which says what to change."""
_MOST_LINES = 50

Location = tuple[int | str, ...]


def joined(lines: Iterable[str]) -> str:
    """Joins lines to one readable message: long lines lose their middle, many lines the rest.

    Unprintable characters, such as escape sequences in a key, are spelled out.
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
    """Returns `data.train[0].path` for ("data", "train", 0, "path")."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def readable(detail: ErrorDetails) -> Iterator[str]:
    """Yields one line for each fault of a pydantic finding, unless another finding covers it."""
    key = dotted(without_kinds(detail["loc"]))
    error = detail.get("ctx", {}).get("error")
    match detail["type"]:
        case "extra_forbidden":
            yield _unknown_key(detail["loc"])
        case "invalid_key":
            place = dotted(without_kinds(detail["loc"])[:-1]) or "the configuration"
            yield f"{place}: a key is a text, but {_shown(detail['input'])} was given as one; change it"
        case "missing" if isinstance(detail["loc"][-1], int):
            if detail["loc"][-1] == len(detail["input"]):
                place = dotted(without_kinds(detail["loc"])[:-1])
                yield f"{place}: more values are needed than {_shown(detail['input'])} has; change it"
        case "missing":
            yield f"{key}: no value is given; set {_required(detail['loc']) or 'it'}"
        case "value_error" if isinstance(error, BrokenRulesError):
            yield from (f"{key}.{message}" if key else message for message in error.messages)
        case "value_error":
            yield f"{key}: {error}; change it"
        case "union_tag_invalid":
            kinds, given = detail["ctx"]["expected_tags"], detail["ctx"]["tag"]
            yield f"{key}.kind: one of {kinds} is needed, but {given!r} was given; change it"
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            yield f"{key}: a section with keys is needed, but {_shown(detail['input'])} was given; change it"
        case "tuple_type" | "dict_type":
            needed = "a list" if detail["type"] == "tuple_type" else "a mapping of keys to values"
            yield f"{key}: {needed} is needed, but {_shown(detail['input'])} was given; change it"
        case "too_short" if detail["input"] and not detail["ctx"]["actual_length"]:
            return  # all of its elements are wrong, and each has its own finding
        case _:
            message = detail["msg"][:1].lower() + detail["msg"][1:]
            yield f"{key}: {message}, but {_shown(detail['input'])} was given; change it"


def without_kinds(location: Location) -> Location:
    """Removes the kind of a section that pydantic adds after the section's name."""
    return _resolved(location)[0]


def _required(location: Location) -> str:
    """Lists the keys that a section at `location` requires; empty for a value."""
    written, section = _resolved(location)
    fields = section.model_fields.items() if section else ()
    asked_for = () if section is None else section.asked_for
    needed = [name for name, field in fields if field.is_required() or name in asked_for]
    return ", ".join(dotted((*written, name)) for name in needed)


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _unknown_key(location: Location) -> str:
    *parents, name = location
    place, section = _resolved(tuple(parents))
    if section and (kinds := _kinds_with(place, str(name))):
        (kind,) = kinds_of(section)
        return (
            f"{dotted((*place, name))}: this is not a key of {dotted((*place, 'kind'))}={kind}, but of "
            f"{' and '.join(kinds)}; remove it or change the kind"
        )
    first, dot, rest = str(name).partition(".")
    if dot and any(first in each.model_fields for each in sections_at(place)):
        return (
            f"{dotted((*place, name))}: in a file, this dot is part of the name and begins no section; write "
            f"{first}: {{{rest}: ...}}"
        )
    keys = list(section.model_fields) if section else []
    return f"{dotted((*place, name))}: there is no such key; {_hint(place, keys, str(name))}"


def unknown_key(name: str) -> str:
    """Explains a dotted key that no configuration has, and names the one that may be meant."""
    *place, last = name.split(".")
    if not place and (near := meant(last, _places())):
        hint = _did_you_mean(_places()[near])
    else:
        keys = dict.fromkeys(key for section in sections_at(tuple(place)) for key in section.model_fields)
        hint = _hint(tuple(place), list(keys), last)
    return f"{name}: there is no such key; {hint}"


def _kinds_with(place: Location, name: str) -> list[str]:
    return [kind for each in sections_at(place) if name in each.model_fields for kind in kinds_of(each)]


def _hint(place: Location, keys: list[str], name: str) -> str:
    """Names the intended key, else the section's keys: first by the same name here and then elsewhere, then by other
    programs' names, then by typos here; never a key with another meaning."""
    from mtrain.config.foreign.keys import FOLLOWING, OURS, SYNONYMS  # only here: tables that take time to read

    known = plain(name)
    if here := next((key for key in keys if plain(key) == known), None):
        return _did_you_mean([dotted((*place, here))])
    own = [dotted((*place, key)) for key in keys if known in SYNONYMS.get(key, ())]
    if known in _places():
        return _did_you_mean([*own, *_places()[known]])
    if own:
        return f"it is {own[0]} here"
    if known in FOLLOWING:
        return f"it follows from {FOLLOWING[known]}; remove it"
    if known in OURS:
        return f"it is {OURS[known]} here"
    if near := meant(name, keys):
        return _did_you_mean([dotted((*place, near))])
    return f"{dotted(place) or 'a configuration'} has {', '.join(keys)}"


def _did_you_mean(keys: list[str]) -> str:
    *others, last = keys
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


@cache
def _places() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}

    def add(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            keys = found.setdefault(name, [])
            if prefix + name not in keys:  # kinds of a section share keys
                keys.append(prefix + name)
            for each in sections_in(field.annotation):
                add(each, prefix + name + separator(field.annotation))

    add(Config, "")
    return found


def _resolved(location: Location) -> tuple[Location, type[Section] | None]:
    """Returns a pydantic location as the user writes it, and its section class, if any."""
    written: list[int | str] = []
    section: type[Section] | None = Config
    parts = iter(location)
    for part in parts:
        written.append(part)
        annotation = section.model_fields[str(part)].annotation if section and part in section.model_fields else None
        found = sections_in(annotation)
        section = found[0] if found else None
        if len(found) > 1 and (kind := next(parts, None)) is not None:
            (section,) = (each for each in found if kind in kinds_of(each))
        elif get_origin(annotation) in (dict, tuple):
            written += islice(parts, 1)  # the index in a list of sections, or the name of one
        elif is_list_or_mapping(annotation) and (form := next(parts, None)) is not None:
            written += islice(parts, 1 if form == AS_LIST else 2)  # an index, or a name and an index
    return tuple(written), section
