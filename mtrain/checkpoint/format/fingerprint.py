"""64-bit fingerprint of the bits of many tensors, whatever rank holds which part.

Every element adds a hash of its bits, its tensor's name and its position in the whole tensor, so the sums of ranks,
shards and files add up to the same number in any order. It detects accidental differences, not forgeries.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_BITS, _OF_POSITION, _MIX = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x1B03738712FAD5C9
"""Odd factors, so that multiplication modulo 2**64 is reversible."""
_CHUNK = 1 << 20
"""Elements hashed at a time; each needs about 40 bytes of temporary memory."""


def hash_of(name: str, values: Tensor, at: TensorSlice, global_shape: Sequence[int]) -> Tensor:
    """Returns the term of a slice, at `at` in the whole tensor, in the fingerprint: an int64 scalar; sums of terms wrap
    around. The values, of any dtype, are [elements] or have the slice's shape."""
    # bits, not numbers: nan must count, and -0 is not 0
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # 63 bits, which fit into int64
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    for start in range(0, bits.numel(), _CHUNK):
        elements = bits[start : start + _CHUNK].to(torch.int64)
        positions = _positions(start, elements.numel(), at, global_shape, bits.device)
        mixed = (elements * _OF_BITS + salt) ^ (positions * _OF_POSITION)
        # shifts between products, because a sum of products alone would not detect two swapped values
        mixed = (mixed ^ (mixed >> 31)) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def shown(total: int) -> str:
    return f"{total % 2**64:016x}"


def _positions(start: int, count: int, at: TensorSlice, global_shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns the positions in the flattened whole tensor of a slice's elements `start` to `start + count`."""
    remaining = torch.arange(start, start + count, dtype=torch.int64, device=device)
    position = torch.zeros_like(remaining)
    # row-major: the last axis varies fastest
    for axis in reversed(range(1, len(global_shape))):
        stride = math.prod(global_shape[axis + 1 :])
        position += (remaining % at.shape[axis] + at.offset[axis]) * stride
        remaining = remaining // at.shape[axis]
    # what remains is the index along the first axis, without another division, the slowest operation here
    return position + (remaining + at.offset[0]) * math.prod(global_shape[1:]) if global_shape else position
