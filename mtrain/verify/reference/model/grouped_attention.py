"""Grouped-query attention, with norms of heads, sinks and windows if the model has them.

Sources: grouped queries: Ainslie et al. 2023. Sinks: gpt-oss model card, arXiv 2508.10925, section 2. Global heads:
Gemma 4 as released.
"""

import math
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection
from mtrain.config.schema.vision import VisionSection
from mtrain.verify.reference.model.attention_kind import (
    AttentionKind,
    KeySet,
    Shape,
    linear_shapes,
    norm_shapes,
    softmax,
)
from mtrain.verify.reference.model.images import axes_of, numbers_of_images, positions_of_pairs
from mtrain.verify.reference.model.modules import Module, linear, norm
from mtrain.verify.reference.model.rotary import rotated, temperature
from mtrain.verify.reference.text import Rows


@final
class GroupedAttention(AttentionKind):
    """Attention in which several query heads share a key and a value."""

    inputs = ("q_proj", "k_proj", "v_proj")

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        heads, size = model.num_attention_heads, model.head_size
        rows = (heads * (2 if model.attention_gate else 1) + 2 * model.query_groups) * size
        yield from linear_shapes(f"{name}.linear_qkv", rows, model.hidden_size, model.linear_bias or model.qkv_bias)
        if model.qk_norm:
            whole = model.qk_norm_width == "full"
            yield from norm_shapes(f"{name}.q_layernorm", heads * size if whole else size, model)
            yield from norm_shapes(f"{name}.k_layernorm", model.query_groups * size if whole else size, model)
        if model.attention_sinks:
            yield f"{name}.core_attention.softmax_offset", (heads,)
        yield from linear_shapes(f"{name}.linear_proj", model.hidden_size, heads * size, model.linear_bias)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        model, groups, size = part.model, part.model.query_groups, part.model.head_size
        shared = model.num_attention_heads // groups
        joined = _by_group(part, x)
        query, key, value = joined[..., :shared, :], joined[..., -2:-1, :], joined[..., -1:, :]
        if model.qk_norm:
            query, key = _normed(part.inner("q_layernorm"), query), _normed(part.inner("k_layernorm"), key)
        window = window_of(model, layer)
        rope = model.rope
        if window is not None and rope.local_base is not None:
            rope = RopeSection(base=rope.local_base, partial=1 if rope.scaling == "proportional" else rope.partial)
        if model.value_norm:
            value = unweighted_norm(value, model)
        key = key.squeeze(3)
        if rotates(model, layer):
            query = partly_rotated(query.flatten(2, 3), rows, rope, model.vision)
            query = query.view(*x.shape[:2], groups, shared, size)
            key = partly_rotated(key, rows, rope, model.vision)
        if rope.attention_temperature:
            query = query * temperature(rows.positions, rope).view(*x.shape[:2], 1, 1, 1)
        scale = 1 / math.sqrt(size if model.query_scalar is None else model.query_scalar)
        scores = torch.einsum("bqghd,bkgd->bghqk", query, key) * scale
        sinks = part.get("core_attention.softmax_offset")
        vision = model.vision
        images = numbers_of_images(rows, vision) if vision is not None and model.has_bidirectional_images else None
        keys = KeySet(rows.documents, window, images)
        weights = softmax(scores, keys, None if sinks is None else sinks.view(groups, shared))
        return torch.einsum("bghqk,bkgd->bqghd", weights, value.squeeze(3)).flatten(2)

    def projected(self, part: Module, x: Tensor, context: Tensor) -> Tensor:
        if part.model.attention_gate:
            shared = part.model.num_attention_heads // part.model.query_groups
            gate = _by_group(part, x)[..., shared : 2 * shared, :].flatten(2)
            context = context / (1 + torch.exp(-gate))
        return super().projected(part, x, context)

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        if linear != "linear_qkv":
            return {"proj": every} if linear == "linear_proj" else None
        heads = every.view(model.query_groups, -1, model.head_size)  # in each group queries (and gates), key, value
        return {"q_proj": heads[:, :-2].flatten(), "k_proj": heads[:, -2].flatten(), "v_proj": heads[:, -1].flatten()}


@final
class GlobalAttention(AttentionKind):
    """Attention to all earlier tokens, with separate heads, whose keys are also their values (Gemma 4)."""

    inputs = ("q_proj", "k_proj")

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        heads, size, groups = model.num_attention_heads, *_global_sizes(model)
        yield from linear_shapes(f"{name}.linear_qk", (heads + groups) * size, model.hidden_size, False)
        if model.qk_norm:
            yield from norm_shapes(f"{name}.q_layernorm", size, model)
            yield from norm_shapes(f"{name}.k_layernorm", size, model)
        yield from linear_shapes(f"{name}.linear_proj", model.hidden_size, heads * size, False)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        model, (size, groups) = part.model, _global_sizes(part.model)
        joined = linear(part, "linear_qk", x).view(*x.shape[:2], groups, -1, size)
        query, key = joined[..., :-1, :], joined[..., -1, :]
        value = unweighted_norm(key, model) if model.value_norm else key
        if model.qk_norm:
            query, key = norm(part.inner("q_layernorm"), query), norm(part.inner("k_layernorm"), key)
        if rotates(model, layer):
            query = partly_rotated(query.flatten(2, 3), rows, model.rope).view(query.shape)
            key = partly_rotated(key, rows, model.rope)
        scale = 1 / math.sqrt(size if model.query_scalar is None else model.query_scalar)
        weights = softmax(torch.einsum("bqghd,bkgd->bghqk", query, key) * scale, KeySet(rows.documents), None)
        return torch.einsum("bghqk,bkgd->bqghd", weights, value).flatten(2)

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        if linear != "linear_qk":
            return {"proj": every} if linear == "linear_proj" else None
        size, groups = _global_sizes(model)
        heads = every.view(groups, -1, size)  # in each group queries, then the key
        return {"q_proj": heads[:, :-1].flatten(), "k_proj": heads[:, -1].flatten()}


def _global_sizes(model: ModelSection) -> tuple[int, int]:
    """Returns the dimensions of a head and the number of keys."""
    section = model.global_attention
    assert section is not None
    return section.head_dim, section.num_query_groups


def _by_group(part: Module, x: Tensor) -> Tensor:
    """Projects by group, [batch, seq, groups, heads, size]: queries, their gates if any, a key and a value."""
    return linear(part, "linear_qkv", x).view(*x.shape[:2], part.model.query_groups, -1, part.model.head_size)


def window_of(model: ModelSection, layer: int) -> int | None:
    """Returns the number of tokens that a layer sees, including the current one; None if it sees all."""
    every = model.global_attention_every
    return None if every is not None and (layer + 1) % every == 0 else model.sliding_window


def rotates(model: ModelSection, layer: int) -> bool:
    """Says whether a layer uses rotary positions; `model.megatron.no_rope_freq` excludes some layers."""
    skipped = model.megatron.get("no_rope_freq")
    if skipped is None:
        return True
    return not skipped[layer] if isinstance(skipped, list) else (layer + 1) % int(skipped) != 0


def unweighted_norm(x: Tensor, model: ModelSection) -> Tensor:
    """Divides the last axis by the root of its mean square."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.norm_epsilon)


def partly_rotated(heads: Tensor, rows: Rows, rope: RopeSection, vision: VisionSection | None = None) -> Tensor:
    """Rotates the first dimensions of [batch, seq, heads, size], as many as `rope.partial` says."""
    size = heads.shape[-1] if rope.scaling == "proportional" else math.floor(heads.shape[-1] * rope.partial)
    positions = rows.positions
    if vision is not None and vision.rope_sections is not None and rows.pictures:
        positions = positions_of_pairs(axes_of(rows, vision), size // 2, vision)
    return torch.cat([rotated(heads[..., :size], positions, rope), heads[..., size:]], dim=-1)


def _normed(part: Module, heads: Tensor) -> Tensor:
    """Normalises each head, or all heads together, [batch, seq, groups, heads, size]."""
    if part.model.qk_norm_width == "head":
        return norm(part, heads)
    return norm(part, heads.flatten(2)).view(heads.shape)
