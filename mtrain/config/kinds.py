"""Sections of several kinds, such as `data`: their classes, and what happens to keys if the kind changes."""

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


def sections_at(place: tuple[int | str, ...]) -> tuple[type[Section], ...]:
    """Returns the classes of a section by its keys as the user writes them, one per kind; empty for a value."""
    found: tuple[type[Section], ...] = (Config,)
    parts = iter(place)
    for part in parts:
        fields = [section.model_fields[str(part)] for section in found if str(part) in section.model_fields]
        found = sections_in(fields[0].annotation) if fields else ()
        if fields and get_origin(fields[0].annotation) in (dict, tuple):
            next(parts, None)  # the index in a list of sections, or the name of one
        elif fields and is_list_or_mapping(fields[0].annotation) and isinstance(next(parts, None), str):
            next(parts, None)
    return found


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Returns the kind of a section that is one of several; empty for other sections."""
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field else ()


def of_one_kind(content: dict[Any, Any]) -> dict[Any, Any]:
    """Removes the keys of other kinds of data, which 0.1.0 wrote and which had no effect."""
    data = content.get("data")
    if not isinstance(data, dict) or not data.keys() >= _DATA_OF_0_1_0:
        return content
    return {**content, "data": _without_keys_of_others("data", data, data["kind"])}


def before_another_kind(under: dict[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the keys of earlier sources that the new kind of a section has as well, if a later source changes the
    kind.

    So `data.kind=mock` on the command line turns any configuration into one of random tokens.

    Args:
        under: Sections of the earlier sources, merged.
    """
    kept = dict(under)
    for name in Config.model_fields:
        old, new = under.get(name), over.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and "kind" in new and new["kind"] != old.get("kind"):
            kept[name] = _without_keys_of_others(name, old, new["kind"])
    return kept


def _without_keys_of_others(name: str, section: dict[Any, Any], kind: object) -> dict[Any, Any]:
    """Removes keys that only other kinds of the section have, if a known kind is given."""
    choices = sections_at((name,))
    own = [key for choice in choices if kind in kinds_of(choice) for key in choice.model_fields]
    others = {key for choice in choices for key in choice.model_fields} - set(own) if own else set()
    return {key: value for key, value in section.items() if key not in others}
