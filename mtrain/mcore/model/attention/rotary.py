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
    """Replaces GPTModel's `rotary_pos_emb`; the model sets the positions before each forward.

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
        self.positions: Tensor | None = None

    def set_positions(self, positions: Tensor, rows_agree: bool) -> None:
        """Sets the positions of the tokens that this context-parallel rank holds.

        Args:
            positions: Positions, [batch, seq_local] int64.
            rows_agree: Whether all rows have the same positions, so that one row serves the whole batch.
        """
        # one row of angles, which broadcasts over the batch
        self.positions = positions[:1] if rows_agree else positions

    def get_rotary_seq_len(self, *context: object) -> int:
        """Implements GPTModel's protocol; the length is not used."""
        return 0

    def forward(self, max_seq_len: int, packed_seq: bool = False, cp_group: object = None) -> Tensor:
        """Returns angles: [seq_local, batch or 1, 1, head_dim] float32."""
        assert self.positions is not None, "the model sets the positions before the forward pass"
        # moves once, in the first forward pass
        self.inverse_frequencies = self.inverse_frequencies.to(self.positions.device)
        # [seq_local, batch or 1, head_dim / 2]
        angles = self.positions.t().unsqueeze(-1).to(torch.float32) * self.inverse_frequencies
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

    def set_positions(self, positions: Tensor, rows_agree: bool) -> None:
        """Sets the positions of both kinds of layer."""
        super().set_positions(positions, rows_agree)
        self.windowed.set_positions(positions, rows_agree)

    def forward(self, max_seq_len: int, packed_seq: bool = False, cp_group: object = None) -> Tensor:
        """Returns angles: [2, seq_local, batch or 1, 1, head_dim] float32, of global and of windowed layers."""
        # GPTModel passes one tensor of angles to all layers; each of them chooses
        return torch.stack((super().forward(max_seq_len), self.windowed(max_seq_len)))


def take_angles_by_layer(model: nn.Module) -> None:
    """Makes every self-attention of a model take the half of a TwoBaseRotary's angles that its window needs."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            # a hook on the module's call also runs when the layer is recomputed
            module.register_forward_pre_hook(_take_own_angles, with_kwargs=True)


def _take_own_angles(
    attention: SelfAttention, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    windowed = has_window(attention.config, attention.layer_number)
    return args, {**options, "rotary_pos_emb": _apart(options["rotary_pos_emb"])[int(windowed)]}


def _apart(angles: Tensor) -> tuple[Tensor, ...]:
    """Returns both halves, the same tensors for all layers of a microbatch, which cache on them (`rotations_of`)."""
    known: tuple[Tensor, ...] | None = getattr(angles, "known_halves", None)
    if known is None:
        known = angles.unbind()
        angles.known_halves = known  # type: ignore[attr-defined]
    return known
