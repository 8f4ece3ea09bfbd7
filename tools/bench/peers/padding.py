"""Batches of conversations in a plain loop: eight at a time, padded to the longest of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain import Datum

BATCH_SIZE = 8
"""Number of rows in one forward pass of the contenders that pad."""


def batched(data: Sequence[Datum]) -> list[Sequence[Datum]]:
    """Divides conversations into batches, in the given order."""
    return [data[start : start + BATCH_SIZE] for start in range(0, len(data), BATCH_SIZE)]


def padded(part: Sequence[Datum]) -> tuple[Tensor, Tensor]:
    """Returns ids and labels, [conversations, longest] int64: id 0 after the end, label -100 where none counts."""
    longest = max(len(datum.input_ids) for datum in part)
    ids, labels = (torch.full((len(part), longest), fill) for fill in (0, -100))
    for row, datum in enumerate(part):
        given = torch.tensor(datum.input_ids)
        ids[row, : len(given)] = given
        labels[row, : len(given)] = torch.where(torch.tensor(datum.weights) > 0, given, -100)
    return ids, labels
