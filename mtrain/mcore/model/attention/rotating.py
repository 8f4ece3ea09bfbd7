"""megatron-core's self-attention, which on a CPU turns queries and keys by our own rotation."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from mtrain.mcore.model.rotary.rotation import rotated


class RotatingAttention(SelfAttention):
    """Self-attention of grouped queries."""

    _angles: Tensor | None = None
    """Of the call that runs, where queries and keys are turned here."""

    def forward(
        self, hidden_states: Tensor, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's.

        Args:
            hidden_states: [seq_local, batch, hidden].
            arguments: As megatron-core's.
            rotary_pos_emb: Angles [seq_local, batch or 1, 1, 2 r] in radians, float32, the second half as the first.
            options: As megatron-core's.
        """
        # in half precision the sums are rounded where megatron-core and transformers round them; compilers fuse
        is_wide = hidden_states.device.type == "cpu" and hidden_states.dtype.itemsize >= 4
        if not is_wide or torch.compiler.is_compiling():
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **options
            )
            return output
        without = self.config.no_rope_freq
        self._angles = None if without and without[self.layer_number - 1] else rotary_pos_emb
        try:
            output = super().forward(hidden_states, *arguments, rotary_pos_emb=None, **options)
        finally:
            self._angles = None
        return output

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """As megatron-core's; turned, where `forward` has left that to it."""
        query, key, *others = super().get_query_key_value_tensors(*arguments, **options)
        if self._angles is not None:
            turns = self._angles[..., : self._angles.shape[-1] // 2]
            cosine, sine = turns.cos().to(query.dtype), turns.sin().to(query.dtype)
            query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        return query, key, *others
