"""Turning queries and keys by their angles on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns dimension i of the first 2 r of each head with i + r.

    One new tensor and three passes forward, the same backward; nothing is kept but the arguments that are shared by all
    heads. megatron-core's own (rope_utils.py, `_apply_rotary_pos_emb_bshd`) makes seven passes and five tensors.

    Args:
        heads: [seq, batch, heads, head_dim].
        cosine: [seq, batch or 1, 1, r] of the angles, in the dtype of the heads.
        sine: Likewise.

    Returns:
        As heads; dimensions from 2 r on are as they were.
    """
    turned: Tensor = _Rotation.apply(heads, cosine, sine)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(heads, cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(gradient, cosine, sine, -1.0), None, None  # the inverse of a rotation is its transpose


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    """By the angle times the sign."""
    size = cosine.shape[-1]
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    first, second = heads[..., :size], heads[..., size : 2 * size]
    # the whole rotary part at once: halves alone are half as long a run of memory
    torch.mul(heads[..., : 2 * size], torch.cat((cosine, cosine), dim=-1), out=output[..., : 2 * size])
    output[..., :size].addcmul_(second, sine, value=-sign)
    output[..., size : 2 * size].addcmul_(first, sine, value=sign)
    if heads.shape[-1] > 2 * size:
        output[..., 2 * size :].copy_(heads[..., 2 * size :])
    return output
