"""Removal of secrets from what leaves the machine: by their names, and by values from the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "<redacted>"
_WORD = re.compile(r"apikey|auth|authorization|bearer|credentials?|passphrase|passwd|password|secrets?|token")
_PAIR = re.compile(r"(api|access|private|signing|encryption)_key")
_LOGIN_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET = 6
"""Length in characters from which a value is removed; a shorter one would match ordinary words."""


def is_secret_name(name: str) -> bool:
    """Says whether a key or a variable of this name holds a secret, such as `hub.api_key` or `HF_TOKEN`."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return any(map(_WORD.fullmatch, words)) or _PAIR.search("_".join(words)) is not None


def without_secrets(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns values as text that may be sent to others.

    Args:
        values: Dotted key -> value.
        environment: Environment variables of this process; values of those with a secret name are removed wherever they
            occur.
    """
    secrets = sorted({text for name, text in environment.items() if is_secret_name(name)}, key=len, reverse=True)
    long = [text for text in secrets if len(text) >= _SHORTEST_SECRET]
    return {key: REDACTED if value and is_secret_name(key) else _cleaned(value, long) for key, value in values.items()}


def _cleaned(value: Any, secrets: list[str]) -> str:
    text = _LOGIN_IN_URL.sub(REDACTED, value if isinstance(value, str) else json.dumps(_inside(value), default=str))
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def _inside(value: Any) -> Any:
    """Replaces the values of secret names in a list or section, at any depth."""
    if isinstance(value, Mapping):
        return {name: REDACTED if each and is_secret_name(str(name)) else _inside(each) for name, each in value.items()}
    return [_inside(each) for each in value] if isinstance(value, list | tuple) else value
