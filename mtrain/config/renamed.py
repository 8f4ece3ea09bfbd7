"""Names of version 0.1.0 that have changed; version 0.2 is the last to accept them."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from mtrain.base.errors import ConfigError

LAST_VERSION = "0.2"

KEYS = {
    "model.mla.q_rank": "model.mla.q_lora_rank",
    "model.mla.kv_rank": "model.mla.kv_lora_rank",
    "model.mla.nope_head_dim": "model.mla.qk_nope_head_dim",
    "model.mla.rope_head_dim": "model.mla.qk_rope_head_dim",
    "model.mla.value_head_dim": "model.mla.v_head_dim",
    "checkpoint.rehearse": "checkpoint.self_test",
    "data.chat_format": "data.chat_template",
}
"""Old dotted key -> new key, in the same section."""

VALUES = {
    "data.kind": {"jsonl": "sft"},
    "data.too_long": {"truncate": "end"},
}
"""Dotted key -> old value -> new value."""

LOSS_FUNCTIONS = {
    "mtrain.loss.next_token:next_token_loss": "next_token",
    "mtrain.loss.z_loss:z_loss": "z_loss",
    "mtrain.loss.entropy:entropy_loss": "entropy",
    "mtrain.loss.distillation:distillation_loss": "distillation",
}
"""Path of a loss function in version 0.1.0 -> new name."""


class RenamedKeyWarning(FutureWarning):
    """A configuration uses an old name."""


def with_current_names(content: Mapping[Any, Any], origin: str) -> dict[Any, Any]:
    """Replaces old names as `current_names` does; warns of each one (`RenamedKeyWarning`)."""
    current, notes = current_names(content, origin)
    for note in notes:
        warnings.warn(note, RenamedKeyWarning, stacklevel=2)
    return current


def current_names(content: Mapping[Any, Any], origin: str) -> tuple[dict[Any, Any], list[str]]:
    """Replaces every old name in a configuration or a part of one.

    Args:
        content: Nested sections, from the root; not modified.
        origin: File name or other origin, for the notes.

    Returns:
        Content with new names, and a note on each old name.

    Raises:
        ConfigError: A key is given under both names.
    """
    current, notes = _copied(content), []
    for old, new in KEYS.items():
        section, old_name, new_name = _section(current, old), old.rpartition(".")[2], new.rpartition(".")[2]
        if old_name not in section:
            continue
        if new_name in section:
            raise ConfigError(f"{origin}: {old} and {new} are two names of one key; remove {old}")
        section[new_name] = section.pop(old_name)
        notes.append(_note(f"{old} is called {new} now", origin))
    for key, names in VALUES.items():
        section, name = _section(current, key), key.rpartition(".")[2]
        value = section.get(name)
        if not isinstance(value, str) or value not in names:
            continue
        section[name] = names[value]
        notes.append(_note(f"{key}={value} is called {names[value]} now", origin))
        if value == "jsonl" and "chat_template" not in section:
            # jsonl applied no chat template, sft does
            section["chat_template"] = "plain"
            notes.append(f"{origin}: data.kind=jsonl had no chat template, so data.chat_template=plain is set")
    for key, term in _terms(current):
        path = term.get("function")
        if isinstance(path, str) and path in LOSS_FUNCTIONS:
            term["function"] = LOSS_FUNCTIONS[path]
            notes.append(_note(f"{key}.function={path} is called {LOSS_FUNCTIONS[path]} now", origin))
    return current, notes


def _note(change: str, origin: str) -> str:
    return f"{origin}: {change}; version {LAST_VERSION} is the last one that understands the old name"


def _copied(content: Any) -> Any:
    """Copies mappings at every depth, but not their values."""
    return {key: _copied(value) for key, value in content.items()} if isinstance(content, Mapping) else content


def _section(content: Any, key: str) -> dict[Any, Any]:
    for name in key.split(".")[:-1]:
        content = content.get(name) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _terms(content: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    yield "loss", _section(content, "loss.function")
    for name, term in _section(content, "loss.side_terms.name").items():
        if isinstance(term, dict):
            yield f"loss.side_terms.{name}", term
