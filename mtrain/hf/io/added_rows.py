"""Table rows for tokens that a run adds: each begins as the mean of the rows before them.

transformers' `resize_token_embeddings` draws around this mean (with 1e-9 of the rows' covariance). Without the draw the
same run starts with the same bits. Every rank computes it from the whole table on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice

_ROWS_AT_ONCE = 4096


class AddedRows(NamedTuple):
    """Rows of a table that are not read from the folder."""

    first: int
    end: int
    """Row after the last added one; rows from here on are read again, although no token has them."""
    num_rows: int

    def are_in(self, wanted: TensorSlice) -> bool:
        """Says whether a slice of a table contains any added row."""
        return wanted.offset[0] < self.end and wanted.offset[0] + wanted.shape[0] > self.first

    def filled(self, wanted: TensorSlice, mean: Tensor, read: Callable[[TensorSlice], Tensor]) -> Tensor:
        """Builds a slice of a table.

        Args:
            wanted: Slice of the table with the added rows.
            mean: [hidden] the row of every added token.
            read: Reads a slice of the table in the folder.
        """
        start, columns = wanted.offset[0], slice(wanted.offset[1], wanted.offset[1] + wanted.shape[1])
        result = mean[columns].expand(wanted.shape).clone()
        for low, high in ((start, self.first), (max(start, self.end), start + wanted.shape[0])):
            if low < high:
                own = TensorSlice((low, wanted.offset[1]), (high - low, wanted.shape[1]))
                own.within(wanted).of(result).copy_(read(own))
        return result


def mean_row(num_rows: int, width: int, read: Callable[[TensorSlice], Tensor]) -> Tensor:
    """Computes the mean [hidden] of a table's first rows in float64, rounded to its dtype.

    numpy adds rows one by one with any number of threads, so every layout gets the same bits.
    """
    total = np.zeros(width)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = read(TensorSlice((start, 0), (min(_ROWS_AT_ONCE, num_rows - start), width)))
        dtype = rows.dtype
        total += rows.double().numpy().sum(axis=0)
    return torch.from_numpy(total / num_rows).to(dtype)
