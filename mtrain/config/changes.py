"""Differences between two resolved configurations."""

import json
from dataclasses import dataclass
from typing import Any

from mtrain.base.yaml_text import read_yaml
from mtrain.config import Config
from mtrain.config.consent import NEUTRAL_KEYS, lies_in
from mtrain.config.kinds import of_one_kind
from mtrain.config.renamed import current_names


@dataclass(frozen=True)
class Change:
    """Key whose value differs between two configurations."""

    key: str
    old: str | None
    """Old value as one line of JSON; None if the key is missing."""
    new: str | None
    is_neutral: bool
    """Whether the run stays the same: the key is in NEUTRAL_KEYS, or below one of them."""


def changes(old_config: str | Config, new_config: str | Config) -> list[Change]:
    """Lists the differences between two resolved configurations, sorted by key, including neutral keys."""
    old, new = flat_keys(old_config), flat_keys(new_config)
    missing = object()
    return [
        Change(key, _shown(old, key), _shown(new, key), lies_in(key, NEUTRAL_KEYS))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing) and not _stands_for_a_section(key, old, new)
    ]


def _stands_for_a_section(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Says whether a null only marks a missing section whose keys the other configuration has."""
    return any(
        key in one and one[key] is None and any(name.startswith(f"{key}.") for name in other)
        for one, other in ((old, new), (new, old))
    )


def _shown(flat: dict[str, Any], key: str) -> str | None:
    return json.dumps(flat[key], ensure_ascii=False, default=str) if key in flat else None


def flat_keys(config: str | Config) -> dict[str, Any]:
    """Flattens a resolved configuration, or its YAML, to dotted key -> value, under current names.

    Lists and empty sections are values.
    """
    flat: dict[str, Any] = {}
    # through JSON, to get the same values as from its YAML
    content = read_yaml(config).content if isinstance(config, str) else json.loads(json.dumps(config.model_dump()))
    assert isinstance(content, dict), "what was loaded, or saved by `write_config`"
    rest: list[tuple[str, Any]] = [("", of_one_kind(current_names(content, "config.yaml")[0]))]
    while rest:
        prefix, value = rest.pop()
        if isinstance(value, dict) and value:
            rest += [(f"{prefix}.{name}" if prefix else str(name), inner) for name, inner in value.items()]
        else:
            flat[prefix] = value
    return flat
