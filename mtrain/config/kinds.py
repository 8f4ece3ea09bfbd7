"""Sections of several kinds, such as `data`: their classes, and the keys that survive a change of kind."""

from collections.abc import Mapping
from typing import Any, get_args, get_origin

from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section, is_list_or_mapping, sections_in

_DATA_OF_0_1_0 = frozenset(
    {"kind", "seq_length", "train", "valid", "test", "split", "tokenizer", "isolate_documents", "too_long"}
)
"""Keys of the data section in version 0.1.0, which had one section for all kinds of data and wrote every key into
config.yaml."""


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings section by section; `over` takes precedence."""
    both = {name for name, value in over.items() if isinstance(value, dict) and isinstance(under.get(name), dict)}
    return {**under, **over, **{name: merged(under[name], over[name]) for name in both}}


def sections_at(location: tuple[int | str, ...]) -> tuple[type[Section], ...]:
    """Returns the classes of a section, one per kind, by its location as the user writes it; empty for a value."""
    sections: tuple[type[Section], ...] = (Config,)
    parts = iter(location)
    for part in parts:
        fields = [section.model_fields[str(part)] for section in sections if str(part) in section.model_fields]
        sections = sections_in(fields[0].annotation) if fields else ()
        if fields and get_origin(fields[0].annotation) in (dict, tuple):
            next(parts, None)  # a section's index in a list, or its name in a mapping
        elif fields and is_list_or_mapping(fields[0].annotation) and isinstance(next(parts, None), str):
            next(parts, None)
    return sections


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Returns the legal values of a section's `kind`, which is one for each class; empty without that key."""
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def of_one_kind(content: dict[Any, Any]) -> dict[Any, Any]:
    """Removes the keys of other kinds of data, which 0.1.0 wrote and which had no effect."""
    data = content.get("data")
    if not isinstance(data, dict) or not data.keys() >= _DATA_OF_0_1_0:
        return content
    return {**content, "data": _keys_of_kind("data", data, data["kind"])}


def before_another_kind(under: dict[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Removes keys of earlier sources that a section's new kind lacks, if a later source changes the kind.

    So `data.kind=mock` on the command line makes any configuration train on random tokens.

    Args:
        under: Merged sections of the earlier sources.
        over: Sections of the later source.
    """
    sections = dict(under)
    for name in Config.model_fields:
        old, new = under.get(name), over.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and "kind" in new and new["kind"] != old.get("kind"):
            sections[name] = _keys_of_kind(name, old, new["kind"])
    return sections


def _keys_of_kind(name: str, section: dict[Any, Any], kind: object) -> dict[Any, Any]:
    """Removes keys that only other kinds of the section have; removes none if the kind is unknown."""
    choices = sections_at((name,))
    known = {key for choice in choices if kind in kinds_of(choice) for key in choice.model_fields}
    if not known:
        return section
    foreign = {key for choice in choices for key in choice.model_fields} - known
    return {key: value for key, value in section.items() if key not in foreign}
