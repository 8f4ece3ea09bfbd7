"""Reads MXFP4, the format of GPT-OSS, as bfloat16, and writes it.

`W_blocks` packs 32 numbers of 4 bits into 16 bytes, and `W_scales` has the exponent of each block. W is transposed, so
that a block runs along the inputs of a projection.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.hf.io.folder import HfFolder

FORMAT = "quantization_config"
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
BLOCK_SIZE, BLOCK_BYTES = 32, 16
"""Number of weights in a block, and of its bytes."""
_HALVES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BYTES = torch.arange(256)
# numbers are doubled and factors halved, since float32 cannot represent the largest scale, 2^128, but can half of it
_DOUBLED = 2 * torch.cat([_HALVES, -_HALVES])
_PAIRS = torch.stack([_DOUBLED[_BYTES & 15], _DOUBLED[_BYTES >> 4]], dim=1)
"""[256, 2]: twice the two numbers in each byte, the lower half of the byte first."""
_FACTORS = torch.ldexp(torch.ones(256), _BYTES - 128)
"""[256]: half of each scale's factor, 2^(scale - 127)."""
_INVERSES = torch.ldexp(torch.ones(256), 127 - _BYTES)
"""[256]: inverse of each scale's factor."""
_CHUNK = 1 << 20
_BIAS, _LARGEST_EXPONENT, _LARGEST_SCALE, _LARGEST_CODE = 127, 2, 254, 7
"""Bias of a scale's exponent, exponent of the largest code's number, largest finite scale, largest unsigned code."""


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json announces weights in MXFP4."""
    quantization = config.get(FORMAT)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


class Mxfp4:
    """A folder's weights, with MXFP4 as bfloat16 under plain names, one tensor at a time."""

    def __init__(self, folder: HfFolder) -> None:
        """Checks that blocks and scales match."""
        self._folder = folder
        stored = folder.names()
        self._packed = {name.removesuffix(BLOCKS_SUFFIX) for name in stored if name.endswith(BLOCKS_SUFFIX)}
        scaled = {name.removesuffix(SCALES_SUFFIX) for name in stored if name.endswith(SCALES_SUFFIX)}
        for name in sorted(self._packed | scaled):
            facts = [
                folder.facts(name + end) if name + end in stored else None for end in (BLOCKS_SUFFIX, SCALES_SUFFIX)
            ]
            if not _fits(*facts) or name in stored:
                raise DataError(
                    f"{folder.path}: {name} in mxfp4 needs {BLOCKS_SUFFIX} as bytes [experts, outputs, blocks, "
                    f"{BLOCK_BYTES}], {SCALES_SUFFIX} as bytes [experts, outputs, blocks], and no other tensor "
                    "of that name; download it again"
                )
        self._plain = {name for name in stored if not name.endswith((BLOCKS_SUFFIX, SCALES_SUFFIX))}

    def names(self) -> set[str]:
        """Returns the names of all tensors, with blocks under plain names and without scales."""
        return self._plain | self._packed

    def facts(self, name: str) -> tuple[torch.dtype, Sizes]:
        if name not in self._packed:
            return self._folder.facts(name)
        num_experts, outputs, blocks, size = self._folder.facts(name + BLOCKS_SUFFIX)[1]
        return torch.bfloat16, (num_experts, blocks * size * 2, outputs)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor; computes one in MXFP4 at each call, one expert at a time."""
        if name not in self._packed:
            return self._folder.tensor(name)
        return unpacked(*(self._folder.tensor(name + end) for end in (BLOCKS_SUFFIX, SCALES_SUFFIX)))

    def expect(self, name: str) -> None:
        """Asks the system to read ahead a tensor's stored bytes, except the small scales."""
        self._folder.expect(name + BLOCKS_SUFFIX if name in self._packed else name)


def _fits(blocks: tuple[torch.dtype, Sizes] | None, scales: tuple[torch.dtype, Sizes] | None) -> bool:
    if blocks is None or scales is None or (blocks[0], scales[0]) != (torch.uint8, torch.uint8):
        return False
    return len(blocks[1]) == 4 and blocks[1] == (*scales[1], BLOCK_BYTES)


class Packed(NamedTuple):
    blocks: Tensor
    """[experts, outputs, blocks, 16] uint8."""
    scales: Tensor
    """[experts, outputs, blocks] uint8."""


def packed(name: str, weight: Tensor, scales: Tensor) -> Packed:
    """Rounds a weight to MXFP4.

    A block keeps its scale if it expresses all of the block's numbers exactly, so unchanged numbers keep their bytes.
    Any other block gets the scale of the specification: the largest power of two not above the block's largest number,
    divided by the largest power of two among the codes, 4. Numbers are rounded to the nearest code, ties to the even
    one, and saturate at the largest code.

    Args:
        weight: [experts, inputs, outputs] in a floating-point dtype.
        scales: [experts, outputs, inputs / 32] uint8, the earlier scales of the blocks.

    Raises:
        DataError: A number is infinite or nan.

    Source: OCP Microscaling Formats (MX) 1.0, 5.3.3 and 6.3.
    """
    num_experts, num_inputs, num_outputs = weight.shape
    result = Packed(torch.empty((*scales.shape, BLOCK_BYTES), dtype=torch.uint8), torch.empty_like(scales))
    num_rows = max(1, _CHUNK // num_inputs)
    for expert, start in product(range(num_experts), range(0, num_outputs, num_rows)):
        rows = slice(start, start + num_rows)
        # float32 represents half precision exactly, and float64 stays float64, so only the codes round
        numbers = weight[expert, :, rows].T.contiguous().to(torch.promote_types(weight.dtype, torch.float32))
        if not numbers.isfinite().all():
            raise DataError(
                f"{name} contains infinite numbers or NaN, which MXFP4 cannot represent; export without mxfp4"
            )
        blocks = numbers.reshape(len(numbers), -1, BLOCK_SIZE)
        before = scales[expert, rows]
        codes, chosen = _codes(blocks, before), before.clone()
        is_other = (_numbers(codes, before) != blocks).any(dim=2)
        if is_other.any():
            changed = blocks[is_other]
            chosen[is_other] = _scales(changed)
            codes[is_other] = _codes(changed, chosen[is_other])
        result.blocks[expert, rows] = codes[..., ::2] | codes[..., 1::2] << 4
        result.scales[expert, rows] = chosen
    return result


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Converts MXFP4 blocks and scales, as in `Packed`, to a bfloat16 weight [experts, inputs, outputs]."""
    num_experts, outputs, num_blocks, size = blocks.shape
    result = torch.empty((num_experts, num_blocks * size * 2, outputs), dtype=torch.bfloat16)
    # a few rows of an expert at a time, so that float32 temporaries are small
    num_rows = max(1, _CHUNK // result.shape[1])
    for expert, start in product(range(num_experts), range(0, outputs, num_rows)):
        packed, exponents = (tensor[expert, start : start + num_rows] for tensor in (blocks, scales))
        pairs = _PAIRS.index_select(0, packed.flatten().int()).view(*exponents.shape, -1)
        # exact, because a 4-bit number has two significant bits, and bfloat16 has float32's exponents
        numbers = (pairs * _FACTORS[exponents.int(), None]).bfloat16()
        result[expert, :, start : start + num_rows] = numbers.flatten(1).T
    return result


def rounding_error(weight: Tensor, rounded: Tensor) -> float:
    """Returns the largest error, relative to the largest number in its block, of a rounded weight; both are [experts,
    inputs, outputs]."""
    worst = 0.0
    for exact, approximate in zip(weight, rounded):  # one expert at a time, because temporaries are in float64
        pair = (exact.double(), approximate.double() - exact.double())
        blocks, errors = (values.view(-1, BLOCK_SIZE, values.shape[1]).abs().amax(1) for values in pair)
        # an all-zero block has no error
        worst = max(worst, float((errors / blocks.where(blocks > 0, 1.0)).max()))
    return worst


def _scales(blocks: Tensor) -> Tensor:
    """Returns the specification's scale for each block of [..., 32]."""
    # frexp returns a mantissa in [0.5, 1), so its exponent is one too large
    _, exponents = torch.frexp(blocks.abs().amax(dim=-1))
    return (exponents - 1 - _LARGEST_EXPONENT + _BIAS).clamp(0, _LARGEST_SCALE).to(torch.uint8)


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the codes of numbers [..., 32] under their scales [...]; -0.0 has its own code."""
    # exact, except for numbers far below the smallest code or above the largest one
    scaled = blocks.abs() * _INVERSES[scales.int(), None]
    # numbers of successive codes are 0.5 apart up to 2, 1 apart up to 4 and 2 apart up to 6: the minimum of three lines
    codes = torch.minimum((2 * scaled).round_(), scaled.round().add_(2))
    codes = torch.minimum(codes, (scaled / 2).round_().add_(4)).clamp_(max=_LARGEST_CODE)
    return codes.to(torch.uint8) | blocks.signbit().to(torch.uint8) << 3


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    return _DOUBLED.index_select(0, codes.flatten().int()).view(codes.shape) * _FACTORS[scales.int(), None]
