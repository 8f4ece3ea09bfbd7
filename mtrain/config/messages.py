"""Messages for pydantic's errors: the dotted key, what was given, what is needed and what to change."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import get_origin

from pydantic_core import ErrorDetails, ValidationError

from mtrain.base.spelling import meant, plain
from mtrain.config.keys import separator
from mtrain.config.kinds import kinds_of, sections_at
from mtrain.config.schema.root import Config
from mtrain.config.schema.section import AS_LIST, BrokenRulesError, Section, is_list_or_mapping, sections_in

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of shell scripts."""
_LONGEST_VALUE = 80
_LONGEST_LINE = 1000
_LONGEST_END = 200
"""Characters kept from a long line's end, which says what to change."""
_MOST_LINES = 50

Location = tuple[int | str, ...]


def joined(lines: Iterable[str]) -> str:
    """Joins lines into one message; cuts out the middle of long lines, and lines beyond the first 50.

    Unprintable characters, such as escape sequences in a key, are escaped.
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
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def not_a_script(path: str) -> str:
    """Returns the refusal of a shell script: only the arguments that it prints can be translated."""
    return (
        f"{path}: this is a shell script, which is not executed here; write `echo` before its command that starts "
        f"training, and translate what it prints, for instance: mtrain from megatron-lm $(bash {path})"
    )


def dotted(location: Location) -> str:
    """Returns `data.train[0].path` for ("data", "train", 0, "path")."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def in_one_line(error: ValidationError) -> str:
    """Returns all messages of an error."""
    return "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))


def readable(detail: ErrorDetails) -> Iterator[str]:
    """Yields one line for each fault in an error of pydantic, unless another error covers it."""
    key = dotted(without_kinds(detail["loc"]))
    error = detail.get("ctx", {}).get("error")
    match detail["type"]:
        case "extra_forbidden":
            yield _unknown_key(detail["loc"])
        case "invalid_key":
            section = dotted(without_kinds(detail["loc"])[:-1]) or "the configuration"
            yield f"{section}: a key must be text, but {_shown(detail['input'])} was given; change it"
        case "missing" if isinstance(detail["loc"][-1], int):
            if detail["loc"][-1] == len(detail["input"]):
                parent = dotted(without_kinds(detail["loc"])[:-1])
                yield f"{parent}: more values are needed than {_shown(detail['input'])} has; change it"
        case "missing":
            yield f"{key}: no value is given; set {_required(detail['loc']) or 'it'}"
        case "value_error" if isinstance(error, BrokenRulesError):
            yield from (f"{key}.{message}" if key else message for message in error.messages)
        case "value_error":
            yield f"{key}: {error}; change it"
        case "union_tag_invalid":
            kinds, kind = detail["ctx"]["expected_tags"], detail["ctx"]["tag"]
            yield f"{key}.kind: one of {kinds} is needed, but {kind!r} was given; {_instead_of(kind)}"
        case "model_type" | "model_attributes_type" | "union_tag_not_found":
            yield f"{key}: a section with keys is needed, but {_shown(detail['input'])} was given; change it"
        case "tuple_type" | "dict_type":
            needed = "a list" if detail["type"] == "tuple_type" else "a mapping of keys to values"
            yield f"{key}: {needed} is needed, but {_shown(detail['input'])} was given; change it"
        case "too_short" if detail["input"] and not detail["ctx"]["actual_length"]:
            return  # all its elements are wrong, and each has its own error
        case _:
            message = detail["msg"][:1].lower() + detail["msg"][1:]
            yield f"{key}: {message}, but {_shown(detail['input'])} was given; {_instead_of(detail['input'])}"


def _instead_of(value: object) -> str:
    """Says what to do about a value that a key does not have."""
    from mtrain.config.foreign.keys import MISSING  # here, because these tables take time to read

    return MISSING.get(plain(value), "change it") if isinstance(value, str) else "change it"


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
    parent, section = _resolved(tuple(parents))
    key = dotted((*parent, name))
    if section and (kinds := _kinds_with(parent, str(name))):
        (kind,) = kinds_of(section)
        return (
            f"{key}: this is not a key of {dotted((*parent, 'kind'))}={kind}, but of {' and '.join(kinds)}; remove it "
            "or change the kind"
        )
    first, dot, last = str(name).partition(".")
    if dot and any(first in choice.model_fields for choice in sections_at(parent)):
        return (
            f"{key}: in a file, a dot is part of the name and does not begin a section; write {first}: {{{last}: ...}}"
        )
    keys = list(section.model_fields) if section else []
    return f"{key}: there is no such key; {_hint(parent, keys, str(name))}"


def unknown_key(name: str) -> str:
    """Returns the message for a dotted key that no configuration has, with the key that the user may mean."""
    *parent, last = name.split(".")
    if not parent and (near := meant(last, _keys_by_name())):
        hint = _did_you_mean(_keys_by_name()[near])
    else:
        keys = dict.fromkeys(key for section in sections_at(tuple(parent)) for key in section.model_fields)
        hint = _hint(tuple(parent), list(keys), last)
    return f"{name}: there is no such key; {hint}"


def _kinds_with(parent: Location, name: str) -> list[str]:
    return [kind for section in sections_at(parent) if name in section.model_fields for kind in kinds_of(section)]


def _hint(parent: Location, keys: list[str], name: str) -> str:
    """Suggests the intended key, or lists the section's keys: by the same name in the section and then elsewhere, by
    other programs' names, by typos in the section; never a key with another meaning."""
    from mtrain.config.foreign.keys import (
        FOLLOWING,
        MISSING,
        OURS,
        SYNONYMS,
    )  # here, because these tables take time to read

    known = plain(name)
    if here := next((key for key in keys if plain(key) == known), None):
        return _did_you_mean([dotted((*parent, here))])
    synonyms = [dotted((*parent, key)) for key in keys if known in SYNONYMS.get(key, ())]
    is_of_list = any(isinstance(part, int) for part in parent)  # its entries have no key of another section
    if known == "name" and is_of_list and parent[0] == "data":
        return f"several sets are a mapping of their names: {dotted(parent[:2])}: {{NAME: [{{path: ...}}]}}"
    if known in _keys_by_name() and not is_of_list:
        return _did_you_mean([*synonyms, *_keys_by_name()[known]])
    if synonyms:
        return f"it is {synonyms[0]} here"
    if known in FOLLOWING:
        return f"it follows from {FOLLOWING[known]}; remove it"
    if known in OURS:
        return f"it is {OURS[known]} here"
    if known in MISSING:
        return MISSING[known]
    if near := meant(name, keys):
        return _did_you_mean([dotted((*parent, near))])
    return f"{dotted(parent) or 'a configuration'} has {', '.join(keys)}"


def _did_you_mean(keys: list[str]) -> str:
    *first, last = keys
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


@cache
def _keys_by_name() -> Mapping[str, list[str]]:
    by_name: dict[str, list[str]] = {}

    def add(section: type[Section], prefix: str) -> None:
        for name, field in section.model_fields.items():
            keys = by_name.setdefault(name, [])
            if prefix + name not in keys:  # kinds of a section share keys
                keys.append(prefix + name)
            for child in sections_in(field.annotation):
                add(child, prefix + name + separator(field.annotation))

    add(Config, "")
    return by_name


def _resolved(location: Location) -> tuple[Location, type[Section] | None]:
    """Returns pydantic's location as the user writes it, and the class of its section; None for a value."""
    written: list[int | str] = []
    section: type[Section] | None = Config
    parts = iter(location)
    for part in parts:
        written.append(part)
        annotation = section.model_fields[str(part)].annotation if section and part in section.model_fields else None
        choices = sections_in(annotation)
        section = choices[0] if choices else None
        if len(choices) > 1 and (kind := next(parts, None)) is not None:
            (section,) = (choice for choice in choices if kind in kinds_of(choice))
        elif get_origin(annotation) in (dict, tuple):
            written += islice(parts, 1)  # a section's index in a list, or its name in a mapping
        elif is_list_or_mapping(annotation) and (form := next(parts, None)) is not None:
            written += islice(parts, 1 if form == AS_LIST else 2)  # an index, or a name and an index
    return tuple(written), section
