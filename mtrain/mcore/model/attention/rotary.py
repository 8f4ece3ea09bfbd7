"""Rotary position embedding from explicit positions.

megatron-core derives positions from the length of the sequence and knows llama3 scaling only with fixed constants. Here
the positions come with the batch (cut by the same index as the tokens, restarting at documents), and the frequencies
from `mtrain.mcore.model.attention.frequencies`. Layers with a sliding window may rotate by a base of their own, as in
Gemma-3.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from mtrain.mcore.model.attention.documents import has_window


class Rotary(nn.Module):
    """Angles by which the tokens at given positions are rotated.

    The frequencies are no buffer: rounded to a half-precision model's dtype, they would rotate a token at position 4095
    by up to 7 radians too much.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        """
        Args:
            inverse_frequencies: [head_dim / 2] float32.
        """
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles, [seq_local, batch or 1, 1, head_dim] float32.

        Args:
            positions: Positions of the tokens that this context-parallel rank holds, [batch or 1, seq_local] int64.
        """
        # moves once, in the first forward pass
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        # [seq_local, batch or 1, head_dim / 2]
        angles = positions.t().unsqueeze(-1).to(torch.float32) * self.inverse_frequencies
        # twice, since megatron-core rotates dimension i with i + head_dim / 2 (rope_utils.py)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


class TwoBaseRotary(Rotary):
    """The angles of both kinds of layer; each attention takes its own."""

    def __init__(self, inverse_frequencies: Tensor, windowed: Tensor) -> None:
        """
        Args:
            inverse_frequencies: [head_dim / 2] float32, of layers without a window.
            windowed: [head_dim / 2] float32, of layers with a window.
        """
        super().__init__(inverse_frequencies)
        self.windowed = Rotary(windowed)
        self.num_global = 2 * len(inverse_frequencies)

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles, those of global layers before those of windowed ones, whose heads may have another size:
        [seq_local, batch or 1, 1, head_dim of the one + that of the other] float32."""
        # the block passes one tensor of angles to all layers; each of them chooses
        return torch.cat((super().forward(positions), self.windowed(positions)), dim=-1)


def take_angles_by_layer(model: nn.Module, rotary: TwoBaseRotary) -> None:
    """Makes every self-attention of a model take the part of a TwoBaseRotary's angles that its window needs."""

    def take_own(
        attention: SelfAttention, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        windowed = has_window(attention.config, attention.layer_number)
        parts = _apart(options["rotary_pos_emb"], rotary.num_global)
        return args, {**options, "rotary_pos_emb": parts[int(windowed)]}

    for module in model.modules():
        if isinstance(module, SelfAttention):
            # a hook on the module's call also runs when the layer is recomputed
            module.register_forward_pre_hook(take_own, with_kwargs=True)


def _apart(angles: Tensor, num_global: int) -> tuple[Tensor, Tensor]:
    """Returns both parts, the same tensors for all layers of a microbatch, which cache on them (`rotations_of`)."""
    known: tuple[Tensor, Tensor] | None = getattr(angles, "known_parts", None)
    if known is None:
        known = angles[..., :num_global], angles[..., num_global:]
        angles.known_parts = known  # type: ignore[attr-defined]
    return known
