"""Exchange of sequence for heads among context-parallel ranks, as Ulysses does it: a rank then has whole rows of a part
of the heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from mtrain.core.batch.zigzag import zigzag_index


def to_heads(part: Tensor, cp: dist.ProcessGroup) -> Tensor:
    """[seq_local, batch, heads, dim] -> [seq in the order of ranks, batch, heads / cp, dim]; one all-to-all."""
    size, (seq, batch, heads, dim) = cp.size(), part.shape
    # the receiver goes first, because the all-to-all cuts the first axis in equal parts
    part = part.reshape(seq, batch, size, heads // size, dim).permute(2, 0, 1, 3, 4)
    return all_to_all(cp, part.reshape(size * seq, batch, heads // size, dim))


def to_sequence(part: Tensor, cp: dist.ProcessGroup) -> Tensor:
    """[seq in the order of ranks, batch, heads / cp, dim] -> [seq_local, batch, heads, dim]; one all-to-all."""
    size, (seq, batch, heads, dim) = cp.size(), part.shape
    # rank r sends the heads of part r: [cp, seq_local, batch, heads / cp, dim]
    part = all_to_all(cp, part.contiguous()).view(size, seq // size, batch, heads, dim)
    return part.permute(1, 2, 0, 3, 4).reshape(seq // size, batch, size * heads, dim)


# Cached: it is the same in every layer and microbatch, and making it copies to the device, for which the host waits.
@lru_cache(maxsize=8)
def row_order(seq: int, cp: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns row positions in the order of the ranks that hold them, and the inverse permutation; [seq] int64 each."""
    held = torch.cat([zigzag_index(seq, cp, rank) for rank in range(cp)])
    return held.to(device), torch.argsort(held).to(device)
