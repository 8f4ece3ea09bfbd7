"""Multi-head latent attention: keys and values come from a narrow latent, positions from separate dimensions.

Source: DeepSeek-V2, arXiv 2405.04434, equations 9 to 19, with the softmax scale and the norms of the released models.
"""

import math
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention_kind import AttentionKind, KeySet, Shape, norm_shapes, softmax
from mtrain.verify.reference.model.modules import Module, linear, norm
from mtrain.verify.reference.model.rotary import growth, rotated
from mtrain.verify.reference.text import Rows

_PARTS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "proj",
}
"""DeepSeek's names of the projections, except the output's, whose name all kinds of attention share."""


@final
class LatentAttention(AttentionKind):
    """Attention in which every head has its own key and value, computed from one latent."""

    inputs = tuple(_PARTS.values())[:-1]

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
        assert mla is not None
        query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            yield f"{name}.linear_q_proj.weight", (query, hidden)
        else:
            yield f"{name}.linear_q_down_proj.weight", (mla.q_lora_rank, hidden)
            yield from norm_shapes(f"{name}.q_layernorm", mla.q_lora_rank, model)
            yield f"{name}.linear_q_up_proj.weight", (query, mla.q_lora_rank)
        yield f"{name}.linear_kv_down_proj.weight", (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
        yield from norm_shapes(f"{name}.kv_layernorm", mla.kv_lora_rank, model)
        yield f"{name}.linear_kv_up_proj.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        yield f"{name}.linear_proj.weight", (hidden, heads * mla.v_head_dim)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        mla, heads = part.model.mla, part.model.num_attention_heads
        assert mla is not None
        down = linear(part, "linear_kv_down_proj", x)
        latent = _latent_norm(part, "kv_layernorm", down[..., : mla.kv_lora_rank])
        shared = _rotated(part.model, down[..., mla.kv_lora_rank :].unsqueeze(2), rows)
        if mla.q_lora_rank is None:
            queries = linear(part, "linear_q_proj", x)
        else:
            narrow = _latent_norm(part, "q_layernorm", linear(part, "linear_q_down_proj", x))
            queries = linear(part, "linear_q_up_proj", narrow)
        query = queries.view(*x.shape[:2], heads, -1)
        up = linear(part, "linear_kv_up_proj", latent).view(*x.shape[:2], heads, -1)
        key, value = up[..., : mla.qk_nope_head_dim], up[..., mla.qk_nope_head_dim :]
        plain = torch.einsum("bqhd,bkhd->bhqk", query[..., : mla.qk_nope_head_dim], key)
        rotated = _rotated(part.model, query[..., mla.qk_nope_head_dim :], rows)
        scores = (plain + torch.einsum("bqhd,bkd->bhqk", rotated, shared.squeeze(2))) * _latent_scale(part.model)
        weights = softmax(scores.unsqueeze(1), KeySet(rows.documents), None).squeeze(1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        return {_PARTS[linear]: every} if linear in _PARTS else None

    def matrices(self, linear: str, every: Tensor, model: ModelSection) -> list[Tensor]:
        mla = model.mla
        assert mla is not None
        if linear == "linear_kv_down_proj":
            return [every[: mla.kv_lora_rank], every[mla.kv_lora_rank :]]
        if linear in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"):
            head = every.view(model.num_attention_heads, -1)
            return [head[:, : mla.qk_nope_head_dim].flatten(), head[:, mla.qk_nope_head_dim :].flatten()]
        return [every]


def _latent_norm(part: Module, name: str, x: Tensor) -> Tensor:
    mla = part.model.mla
    assert mla is not None
    return norm(part.inner(name), x, part.model.norm_epsilon if mla.norm_epsilon is None else mla.norm_epsilon)


def _rotated(model: ModelSection, x: Tensor, rows: Rows) -> Tensor:
    """Rotates [batch, seq, heads, qk_rope_head_dim]; interleaved pairs (0, 1), ... first become (i, i + half)."""
    apart = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) if model.rope.interleaved else x
    return rotated(apart, rows.positions, model.rope)


def _latent_scale(model: ModelSection) -> float:
    assert model.mla is not None
    scale = 1 / math.sqrt(model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
    all_dim = model.rope.mscale_all_dim
    return scale if model.rope.scaling != "yarn" or all_dim is None else scale * growth(model.rope, all_dim) ** 2
