"""Special tokens in the texts of a conversation: they are text, and only what the template writes is a token.

Private characters mark them before the conversation is rendered, so the rendering says where they come from.
"""

from __future__ import annotations

import re
from typing import Any

from mtrain.base.errors import DataError

PRIVATE = re.compile("[\U000f0000-\U000f000f]")
"""Pattern of the characters that mark places in renderings; no text of a conversation may hold them."""
_LITERAL = "\U000f0001"


def holds(value: object, pattern: re.Pattern[str]) -> bool:
    """Says whether any text or key in the value has a match."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(holds(key, pattern) or holds(each, pattern) for key, each in value.items())
    return isinstance(value, list) and any(holds(each, pattern) for each in value)


def with_marks(value: Any, pattern: re.Pattern[str]) -> Any:
    """Puts a mark into each match of a value, after its first character.

    Raises:
        DataError: A key has a match.
    """
    if isinstance(value, str):
        return pattern.sub(lambda match: match.group()[0] + _LITERAL + match.group()[1:], value)
    if isinstance(value, dict):
        if any(isinstance(key, str) and pattern.search(key) for key in value):
            raise DataError("a key holds the text of a special token; rename it")
        return {key: with_marks(each, pattern) for key, each in value.items()}
    return [with_marks(each, pattern) for each in value] if isinstance(value, list) else value


def literal_places(full: str, marked: str) -> frozenset[int]:
    """Returns the places in the rendering at which special tokens from the conversation's texts begin.

    Args:
        full: Rendering of the conversation.
        marked: Rendering of the conversation `with_marks`.

    Raises:
        DataError: The template does more with these texts than to print them.
    """
    pieces = marked.split(_LITERAL)
    if "".join(pieces) != full:
        raise DataError(
            "a text holds that of a special token, and the template does more with it than to print it; remove it, or "
            "set data.special_tokens_in_text=true to let it be the token"
        )
    places, position = [], 0
    for piece in pieces[:-1]:
        position += len(piece)
        places.append(position - 1)
    return frozenset(places)
