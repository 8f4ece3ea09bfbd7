"""Extras of several numbers per token: their names in a configuration, and as columns of one number per token.

Everything between data and loss (caches, packing, context parallelism, broadcasts) moves [batch, seq] arrays, so an
extra of k numbers per token travels as k arrays.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

TEMPERATURE = "temperature"
"""Extra with the temperature at which a sample's tokens were drawn."""
ROUTED_EXPERTS = "routed_experts"
"""Extra with the experts of each input token, [layers, top_k] integers; -1 lets the router choose."""


def key_and_sizes(extra: str) -> tuple[str, tuple[int, ...]]:
    """Splits an entry of data.extras into the records' key and the sizes per token: () for one number, one size for a
    list, two (layers x experts) for routed_experts.

    Raises:
        ValueError: The sizes after the colon are too many, or not integers of at least 1.
    """
    key, colon, text = extra.partition(":")
    sizes = text.split("x") if colon else []
    most = 2 if key == ROUTED_EXPERTS else 1
    if len(sizes) > most or not all(re.fullmatch("0*[1-9][0-9]*", size) for size in sizes):
        raise ValueError(extra)
    return key, tuple(map(int, sizes))


def column(key: str, number: int) -> str:
    """Returns the name of one of several numbers per token, counted from 0."""
    return f"{key}[{number}]"


def columns(key: str, width: int | None) -> list[str]:
    """Returns the column names of an extra."""
    return [key] if width is None else [column(key, number) for number in range(width)]


def columns_of(extra: str) -> list[str]:
    """Returns the column names of an entry of data.extras: routed_experts[0][0] to [1][7] for `routed_experts:2x8`."""
    key, sizes = key_and_sizes(extra)
    return [key + "".join(f"[{number}]" for number in place) for place in itertools.product(*map(range, sizes))]


def choice_columns(names: Sequence[str]) -> tuple[list[int], tuple[int, ...]]:
    """Returns the places of routed experts among columns, and their [layers, top_k]; nothing where there are none."""
    places = [place for place, name in enumerate(names) if name.startswith(f"{ROUTED_EXPERTS}[")]
    last = re.findall(r"\[(\d+)]", names[places[-1]]) if places else []
    return places, tuple(int(number) + 1 for number in last)


def as_configured(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups columns by their entry of data.extras: entry, such as topk_ids:8 -> its columns."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition("[")[0], []).append(name)
    return {key if own == [key] else f"{key}:{len(own)}": own for key, own in found.items()}
