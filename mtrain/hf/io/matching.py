"""Checks that a folder holds exactly the tensors of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.hf.io.block_scaled import PLAIN_NUMBERS, Weights
from mtrain.hf.io.safetensors import raw_bytes
from mtrain.hf.schema.files import CONFIG_NAME
from mtrain.hf.schema.table import Table

_NAMES_SHOWN = 8


def check_names(path: Path, weights: Weights, table: Table, may_be_left: Collection[str]) -> None:
    """Compares the tensors of a folder with a table.

    Args:
        may_be_left: Regular expressions for tensors that may exist and carry no information.

    Raises:
        DataError: A tensor is missing, unexpected, has another shape, holds codes instead of numbers, or differs from
            its original.
    """
    wanted = {tensor.name: tensor.shape for tensor, _ in table.tensors()}
    names = weights.names()
    # only copies that exist: some folders hold a tied tensor twice, others once
    copies = {name: original for name, original in table.copies.items() if name in names}
    missing = sorted(wanted.keys() - names)
    left = sorted(names - wanted.keys() - copies.keys())
    unexpected = [name for name in left if not any(re.fullmatch(pattern, name) for pattern in may_be_left)]
    # all faults in one message: a wrong config.json shows as many tensors of another shape
    faults = [f"lacks {shown(missing)}"] * bool(missing) + [f"holds unexpected {shown(unexpected)}"] * bool(unexpected)
    faults += [
        f"{name} has shape {list(found)} instead of {list(wanted[name])}"
        for name in sorted(wanted.keys() & names)
        if (found := weights.facts(name)[1]) != wanted[name]
    ][:_NAMES_SHOWN]
    faults += [
        f"{name} is {dtype}, but weights have to be plain floating-point numbers"
        for name in sorted(wanted.keys() & names)
        if (dtype := weights.facts(name)[0]) not in PLAIN_NUMBERS
    ][:_NAMES_SHOWN]
    faults += [
        f"{name} differs from {original}, of which it must be a copy"
        for name, original in copies.items()
        # bits, not nearly equal: training would go on from one of the two, and an export writes one
        if original in names and not same_bits(weights.tensor(name), weights.tensor(original))
    ]
    if faults:
        raise DataError(f"{path} does not fit its {CONFIG_NAME}: {'; '.join(faults)}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Says whether two tensors agree in dtype, shape and every bit."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    # bytes, as nan is not equal to itself and 0.0 is equal to -0.0
    mine, theirs = (np.frombuffer(raw_bytes(tensor.contiguous()), np.uint8) for tensor in (one, other))
    words = mine.size // 8 * 8  # compared as 64-bit words: four times as fast
    has_same_words = np.array_equal(mine[:words].view(np.int64), theirs[:words].view(np.int64))
    return has_same_words and np.array_equal(mine[words:], theirs[words:])


def shown(names: Sequence[str]) -> str:
    """Lists the first few names for a message."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
