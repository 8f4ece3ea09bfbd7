"""Names of extras in a configuration, and of their columns with one number per token each.

Everything between data and loss (caches, packing, context parallelism, broadcasts) moves [batch, seq] arrays, so an
extra of k numbers per token travels as k arrays.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

TEMPERATURE = "temperature"
"""Extra with the temperature at which a sample's tokens were sampled."""
ROUTED_EXPERTS = "routed_experts"
"""Extra with the experts of each input token, [layers, top_k] integers; -1 lets the router choose."""


def key_and_sizes(extra: str) -> tuple[str, tuple[int, ...]]:
    """Splits an entry of data.extras into the key in the records and the sizes per token: () for one number, one size
    for a list, two (layers x experts) for routed_experts.

    Raises:
        ValueError: The entry has too many sizes after the colon, or one that is not an integer of at least 1.
    """
    key, colon, text = extra.partition(":")
    sizes = text.split("x") if colon else []
    max_sizes = 2 if key == ROUTED_EXPERTS else 1
    if len(sizes) > max_sizes or not all(re.fullmatch("0*[1-9][0-9]*", size) for size in sizes):
        raise ValueError(extra)
    return key, tuple(map(int, sizes))


def column(key: str, number: int) -> str:
    """Returns the name of the column with the `number`-th number per token, counted from 0."""
    return f"{key}[{number}]"


def columns(key: str, width: int | None) -> list[str]:
    """Returns the column names of an extra with `width` numbers per token; None means one number and one column."""
    return [key] if width is None else [column(key, number) for number in range(width)]


def columns_of(extra: str) -> list[str]:
    """Returns the column names of an entry of data.extras: routed_experts[0][0] to [1][7] for `routed_experts:2x8`."""
    key, sizes = key_and_sizes(extra)
    return [key + "".join(f"[{number}]" for number in indices) for indices in itertools.product(*map(range, sizes))]


def choice_columns(names: Sequence[str]) -> tuple[list[int], tuple[int, ...]]:
    """Returns the indices of columns with routed experts, and their shape [layers, top_k]; both empty without any."""
    indices = [index for index, name in enumerate(names) if name.startswith(f"{ROUTED_EXPERTS}[")]
    last = re.findall(r"\[(\d+)]", names[indices[-1]]) if indices else []
    return indices, tuple(int(number) + 1 for number in last)


def as_configured(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups columns by entry of data.extras: entry, such as topk_ids:8 -> its columns."""
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(name.partition("[")[0], []).append(name)
    return {key if group == [key] else f"{key}:{len(group)}": group for key, group in by_key.items()}
