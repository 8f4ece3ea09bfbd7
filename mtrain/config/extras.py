"""Extras of several numbers a token: how they are named, in a configuration and as columns of one number a token.

All that lies between data and loss (caches, packing, context parallelism, broadcasts) moves [batch, seq] arrays, so an
extra of k numbers a token travels as k of them.
"""

from __future__ import annotations

from collections.abc import Iterable


def key_and_width(extra: str) -> tuple[str, int | None]:
    """The key of records that an entry of data.extras names, and its numbers a token; None where it is one number.

    Raises:
        ValueError: What stands behind the colon is no number of at least 1.
    """
    key, colon, width = extra.partition(":")
    if not colon:
        return key, None
    if not (width.isascii() and width.isdigit() and int(width) > 0):
        raise ValueError(extra)
    return key, int(width)


def column(key: str, number: int) -> str:
    """The name of one of several numbers a token, counted from 0."""
    return f"{key}[{number}]"


def columns(key: str, width: int | None) -> list[str]:
    """The names under which an extra travels."""
    return [key] if width is None else [column(key, number) for number in range(width)]


def as_configured(names: Iterable[str]) -> dict[str, list[str]]:
    """Columns as data.extras names them together: entry, such as topk_ids:8 -> its columns."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("[")[0], []).append(name)
    return {key if own == [key] else f"{key}:{len(own)}": own for key, own in found.items()}
