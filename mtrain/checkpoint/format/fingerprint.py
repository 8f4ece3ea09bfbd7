"""Fingerprint of 64 bits over the bits of many tensors, independent of which rank holds which part.

Every element adds a hash of its bits, its tensor's name and its place in the whole tensor, so the sums of ranks, shards
and files add up to the same number in any order. It detects accidental differences, not forgeries.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_BITS, _OF_PLACE, _MIX = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x1B03738712FAD5C9
"""Odd factors, so that multiplying modulo 2**64 loses nothing."""
_CHUNK = 1 << 20
"""Number of elements that are hashed at a time: each takes some 40 bytes meanwhile."""


def hash_of(name: str, values: Tensor, at: TensorSlice, global_shape: Sequence[int]) -> Tensor:
    """Returns what a slice adds to the fingerprint: an int64 scalar; sums of such numbers wrap around. The values, of
    any dtype, are [elements] or have the shape of the slice, which lies at `at` in the whole tensor."""
    # bits, not numbers: nan must count too, and -0 is not 0
    bits = values.detach().reshape(-1).view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    # 63 bits, since a tensor of int64 takes no larger number
    salt = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    for start in range(0, bits.numel(), _CHUNK):
        own = bits[start : start + _CHUNK].to(torch.int64)
        places = _places(start, own.numel(), at, global_shape, bits.device)
        mixed = (own * _OF_BITS + salt) ^ (places * _OF_PLACE)
        # shifts between products: a sum of products alone would not notice that two values were swapped
        mixed = (mixed ^ (mixed >> 31)) * _MIX
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def shown(total: int) -> str:
    return f"{total % 2**64:016x}"


def _places(start: int, count: int, at: TensorSlice, global_shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns the places, in the flattened whole tensor, of `count` elements of a slice from `start` on."""
    left = torch.arange(start, start + count, dtype=torch.int64, device=device)
    place = torch.zeros_like(left)
    # the last axis is the fastest in the slice and in the whole
    for axis in reversed(range(1, len(global_shape))):
        stride = math.prod(global_shape[axis + 1 :])
        place += (left % at.shape[axis] + at.offset[axis]) * stride
        left = left // at.shape[axis]
    # the rest are numbers along the first axis; divisions cost more than all else here
    return place + (left + at.offset[0]) * math.prod(global_shape[1:]) if global_shape else place
