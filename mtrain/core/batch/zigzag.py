"""Context parallelism cuts rows so that causal attention costs every rank the same.

A row is cut into 2*cp chunks; rank r holds chunks r and 2*cp-1-r. Everything with a sequence axis is cut by the same
index, after labels were shifted and weights computed on whole rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from mtrain.core.batch.batch import Microbatch


def zigzag_index(seq: int, cp_size: int, cp_rank: int) -> Tensor:
    """Returns the positions of a row that a context-parallel rank holds, in its order, [seq / cp_size] int64 on the
    CPU."""
    chunk, rest = divmod(seq, 2 * cp_size)
    assert not rest, f"a row of {seq} tokens cannot be cut into 2 x cp = {2 * cp_size} chunks"
    # causal attention costs a chunk as much as lies before it: r + (2 cp - 1 - r) is the same for every rank
    first, second = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(second, second + chunk)))


@lru_cache(maxsize=8)
def zigzag_index_on(device: torch.device, seq: int, cp_size: int, cp_rank: int) -> Tensor:
    """Returns `zigzag_index` on a device; the tensor is cached, as the host waits for each copy, and must not be
    changed."""
    return zigzag_index(seq, cp_size, cp_rank).to(device)


def slice_for_context_parallel(microbatch: Microbatch, cp_size: int, cp_rank: int) -> Microbatch:
    """Cuts out the part of each row that a rank holds; `document_starts` stays whole, as attention needs it."""
    if cp_size == 1:
        return microbatch
    index = zigzag_index_on(microbatch.tokens.device, microbatch.tokens.shape[1], cp_size, cp_rank)
    return microbatch.map(lambda rows: rows[:, index])
