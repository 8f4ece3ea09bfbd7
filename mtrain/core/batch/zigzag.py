"""Slices rows for context parallelism so that causal attention costs the same on every rank.

A row is cut into 2*cp chunks; rank r holds chunks r and 2*cp-1-r. Everything with a sequence axis is sliced by the same
index, after labels have been shifted and weights computed on whole rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from mtrain.base.spelling import counted
from mtrain.core.batch.batch import Microbatch


def zigzag_index(seq: int, cp_size: int, cp_rank: int) -> Tensor:
    """Returns the positions of a row that a context-parallel rank holds, in order, [seq / cp_size] int64 on the CPU."""
    chunk, remainder = divmod(seq, 2 * cp_size)
    assert not remainder, f"a row of {counted(seq, 'token')} cannot be cut into 2 x cp = {2 * cp_size} chunks"
    # the cost of a chunk grows with the number of chunks before it, and r + (2 cp - 1 - r) is the same for every rank
    first, second = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(second, second + chunk)))


@lru_cache(maxsize=8)
def zigzag_index_on(device: torch.device, seq: int, cp_size: int, cp_rank: int) -> Tensor:
    """Returns `zigzag_index` on a device; cached, since the host waits for each copy, so callers must not change it."""
    return zigzag_index(seq, cp_size, cp_rank).to(device)


def slice_for_context_parallel(microbatch: Microbatch, cp_size: int, cp_rank: int) -> Microbatch:
    """Slices the rows for one rank, except `document_starts`, which attention needs whole."""
    if cp_size == 1:
        return microbatch
    index = zigzag_index_on(microbatch.tokens.device, microbatch.tokens.shape[1], cp_size, cp_rank)
    return microbatch.map(lambda rows: rows[:, index])
