"""Extras of several numbers a token: their names in a configuration, and as columns of one number a token.

Everything between data and loss (caches, packing, context parallelism, broadcasts) moves [batch, seq] arrays, so an
extra of k numbers a token travels as k arrays.
"""

from __future__ import annotations

from collections.abc import Iterable

TEMPERATURE = "temperature"
"""Name of the extra with the temperature that a sample's tokens were drawn at."""
ROUTED_EXPERTS = "routed_experts"
"""Name of the extra with the experts of each token that is read, [layers, top_k] integers; -1 where the router
chooses."""


def key_and_width(extra: str) -> tuple[str, int | None]:
    """Splits an entry of data.extras into the key of records and its numbers a token; None where it is one number.

    Raises:
        ValueError: The text after the colon is no whole number of at least 1.
    """
    key, colon, width = extra.partition(":")
    if not colon:
        return key, None
    if not (width.isascii() and width.isdigit() and int(width) > 0):
        raise ValueError(extra)
    return key, int(width)


def column(key: str, number: int) -> str:
    """Returns the name of one of several numbers a token, counted from 0."""
    return f"{key}[{number}]"


def columns(key: str, width: int | None) -> list[str]:
    """Returns the names under which an extra travels."""
    return [key] if width is None else [column(key, number) for number in range(width)]


def as_configured(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups columns by the entry of data.extras that names them: entry, such as topk_ids:8 -> its columns."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("[")[0], []).append(name)
    return {key if own == [key] else f"{key}:{len(own)}": own for key, own in found.items()}
