"""Attention whose queries grow with their position, as in Llama 4 and Ministral 3.

Source: transformers 5.24, modeling_ministral3.py, `get_llama_4_attn_scale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrain.config.schema.rope import RopeSection
from mtrain.core.layers.attention.rotary import Rotary
from mtrain.core.layers.attention.rotating import RotatingAttention


class TemperedRotary(Rotary):
    """Angles, and the factor of the queries next to them: the block passes one tensor to all layers."""

    def __init__(self, inverse_frequencies: Tensor, rope: RopeSection) -> None:
        """
        Args:
            inverse_frequencies: [head_dim / 2].
            rope: Section with the coefficient and the original length.
        """
        super().__init__(inverse_frequencies)
        self._coefficient, self._length = rope.attention_temperature, rope.original_max_positions

    def forward(self, positions: Tensor) -> Tensor:
        """Returns angles and a factor, [seq_local, batch or 1, 1, head_dim + 1]; takes what `Rotary` does."""
        # whole times that the original length has passed: exact, where a quotient in float32 may round up
        passed = positions.t().div(self._length, rounding_mode="floor").to(self.inverse_frequencies.dtype)
        factor = 1 + self._coefficient * torch.log1p(passed)
        return torch.cat((super().forward(positions), factor[..., None, None]), dim=-1)


class TemperedAttention(RotatingAttention):
    """Self-attention of grouped queries, each multiplied by a factor of its position after the rotation."""

    _factor: Tensor | None = None
    """Factor of the current call, [seq, batch or 1, 1, 1]."""

    def forward(
        self, hidden_states: Tensor, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends like `RotatingAttention`, which describes the arguments; angles are those of a TemperedRotary."""
        assert rotary_pos_emb is not None
        angles, self._factor = _apart(rotary_pos_emb)
        try:
            return super().forward(hidden_states, *arguments, rotary_pos_emb=angles, **options)
        finally:
            self._factor = None

    def get_query_key_value_tensors(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns what `RotatingAttention` does, queries times their factor."""
        assert self._factor is not None
        query, *others = super().get_query_key_value_tensors(hidden_states, *arguments, **options)
        return query * self._factor.to(query.dtype), *others


def _apart(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns angles and factor, the same tensors for all layers of a microbatch, which cache on them
    (`rotations_of`)."""
    known: tuple[Tensor, Tensor] | None = getattr(angles, "known_parts", None)
    if known is None:
        known = angles[..., :-1], angles[..., -1:]
        angles.known_parts = known  # type: ignore[attr-defined]
    return known
