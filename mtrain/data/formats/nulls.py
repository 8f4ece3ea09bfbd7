"""Meaning of a null in a record: none, so that it counts as a key that is absent, whatever the form of the file.

In a table every object of a column has the same keys, and those that an object lacks are null in it; a JSON file that
was written from such a table has these nulls, too. Nobody can tell them from nulls that the author wrote. So a key
whose value is null is left out at any depth, also in tools and in arguments of their calls. Two nulls are kept: the
content of a message, as an answer that is only a call has one, and elements of lists, which no table fills in.
"""

from __future__ import annotations

from typing import Any

_CONVERSATIONS = frozenset({"messages", "prompt", "chosen", "rejected", "completion"})
"""Keys of records under which messages may stand."""


def without_nulls(value: Any) -> Any:
    """Removes keys that are null from a value, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def record_without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Removes keys that are null from a record; messages keep a content that is null."""
    return {
        key: [_message(each) for each in value]
        if key in _CONVERSATIONS and isinstance(value, list)
        else without_nulls(value)
        for key, value in record.items()
        if value is not None
    }


def _message(given: Any) -> Any:
    found = without_nulls(given)
    if isinstance(given, dict) and "content" in given and given["content"] is None:
        # in its place, as a template may write keys in their order
        return {key: found.get(key) for key in given if key in found or key == "content"}
    return found
