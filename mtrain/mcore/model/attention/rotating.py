"""megatron-core's self-attention, with queries and keys rotated by our own code.

megatron-core's own takes cosine and sine of all angles in every layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from mtrain.mcore.model.rotary.rotation import rotated, rotated_as_rounded, rotations_of, split_and_rotated


class RotatingAttention(SelfAttention):
    """Self-attention of grouped queries."""

    _angles: Tensor | None = None
    """Angles of the current call, where queries and keys are rotated here."""

    def forward(
        self, hidden_states: Tensor, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends like megatron-core's module.

        Args:
            hidden_states: [seq_local, batch, hidden].
            arguments: Further arguments of megatron-core's module.
            rotary_pos_emb: Angles [seq_local, batch or 1, 1, 2 r] in radians, float32, the second half equal to the
                first.
            options: Further named arguments of megatron-core's module.
        """
        if torch.compiler.is_compiling():  # fuses by itself
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

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns what megatron-core's method does; rotated, where `forward` has left that to it."""
        if self._angles is None:
            apart: tuple[Tensor, ...] = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
            return apart
        rotations = rotations_of(self._angles, hidden_states.dtype)
        # in half precision the sums are rounded where megatron-core and transformers round them
        is_wide = hidden_states.device.type == "cpu" and hidden_states.dtype.itemsize >= 4
        if is_wide and self._is_plainly_split:
            mixed, _ = self.linear_qkv(hidden_states)
            shape = self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head
            return split_and_rotated(mixed.view(*mixed.shape[:2], *shape), rotations)
        query, key, *others = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        rotate = rotated if is_wide else rotated_as_rounded
        return rotate(query, rotations), rotate(key, rotations), *others

    @property
    def _is_plainly_split(self) -> bool:
        """Says whether the projection holds this rank's queries, keys and values and rotation comes next."""
        norms = self.q_layernorm, self.k_layernorm
        has_own_groups = self.config.num_query_groups >= self.world_size
        is_gated = self.config.attention_output_gate
        return has_own_groups and not is_gated and all(norm is None or isinstance(norm, IdentityOp) for norm in norms)
