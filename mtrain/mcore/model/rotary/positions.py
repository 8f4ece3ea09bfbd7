"""Rotary position embedding from explicit positions.

megatron-core derives positions from the length of the sequence and knows llama3 scaling only with fixed constants. Here
the positions come with the batch (cut by the same index as the tokens, restarting at documents), and the frequencies
from `mtrain.mcore.model.rotary.frequencies`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
