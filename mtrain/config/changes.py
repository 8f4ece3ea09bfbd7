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
    """Whether the run stays the same: the key is in NEUTRAL_KEYS, or in a section there."""


def changes(old_config: str | Config, new_config: str | Config) -> list[Change]:
    """Lists the differences between two resolved configurations, sorted by key, including neutral keys."""
    old, new = flat_keys(old_config), flat_keys(new_config)
    missing = object()
    return [
        Change(key, _shown(old, key), _shown(new, key), lies_in(key, NEUTRAL_KEYS))
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing) and not _marks_missing_section(key, old, new)
    ]


def _marks_missing_section(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Says whether the key is a null that only marks a section whose keys the other configuration has."""
    return any(
        key in one and one[key] is None and any(name.startswith(f"{key}.") for name in other)
        for one, other in ((old, new), (new, old))
    )


def _shown(flat: dict[str, Any], key: str) -> str | None:
    return json.dumps(flat[key], ensure_ascii=False, default=str) if key in flat else None


def flat_keys(config: str | Config) -> dict[str, Any]:
    """Flattens a resolved configuration, or its YAML, to dotted key -> value, with current names.

    Lists and empty sections are values.
    """
    flat: dict[str, Any] = {}
    # through JSON, so that values equal those read from YAML
    content = read_yaml(config).content if isinstance(config, str) else json.loads(json.dumps(config.model_dump()))
    assert isinstance(content, dict), "a whole configuration"
    stack: list[tuple[str, Any]] = [("", of_one_kind(current_names(content, "config.yaml")[0]))]
    while stack:
        prefix, value = stack.pop()
        if isinstance(value, dict) and value:
            stack += [(f"{prefix}.{name}" if prefix else str(name), inner) for name, inner in value.items()]
        else:
            flat[prefix] = value
    return flat
