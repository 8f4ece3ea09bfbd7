"""Causal attention inside documents and windows, every score written out; hidden states are [batch, seq, hidden].

Sources: grouped queries: Ainslie et al. 2023. Sinks: gpt-oss model card, arXiv 2508.10925, section 2. Latent attention:
DeepSeek-V2, arXiv 2405.04434, equations 9 to 19, with the softmax scale and the norms of the released models.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection, RopeSection
from mtrain.verify.reference.model.modules import Module, linear, norm
from mtrain.verify.reference.model.rotary import growth, rotated
from mtrain.verify.reference.text import Rows


class Attended(NamedTuple):
    """What an attention puts out; [batch, seq, ...]."""

    context: Tensor
    """Values under the attention's weights, all heads in a row."""
    projected: Tensor
    """Without the projection's bias."""
    output: Tensor


def attention(part: Module, layer: int, x: Tensor, rows: Rows) -> Attended:
    """Self-attention of layer `layer`, counted from 0."""
    heads = _grouped(part, layer, x, rows) if part.model.mla is None else _latent(part, x, rows)
    projected = heads @ part.tensor("linear_proj.weight").T
    bias = part.get("linear_proj.bias")
    return Attended(heads, projected, projected if bias is None else projected + bias)


def visible(rows: Rows, window: int | None) -> Tensor:
    """[batch, query, key] bool: the same document, not after the query, and less than `window` tokens before it."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    distance = places[:, None] - places[None]
    near = (distance >= 0) & (distance < (len(places) if window is None else window))
    return near & (rows.documents[:, :, None] == rows.documents[:, None, :])


def window_of(model: ModelSection, layer: int) -> int | None:
    """Tokens that a layer sees, itself among them; None where it sees all: every n-th layer may."""
    every = model.global_attention_every
    return None if every is not None and (layer + 1) % every == 0 else model.sliding_window


def rotates(model: ModelSection, layer: int) -> bool:
    """Whether a layer has positions: not every n-th where `model.megatron.no_rope_freq` is n, nor those it marks."""
    skipped = model.megatron.get("no_rope_freq")
    if skipped is None:
        return True
    return not skipped[layer] if isinstance(skipped, list) else (layer + 1) % int(skipped) != 0


def _grouped(part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
    model, groups, size = part.model, part.model.query_groups, part.model.head_size
    shared = model.num_attention_heads // groups
    joined = linear(part, "linear_qkv", x).view(*x.shape[:2], groups, shared + 2, size)
    query, key, value = joined[..., :shared, :], joined[..., shared : shared + 1, :], joined[..., shared + 1 :, :]
    if model.qk_norm:
        query, key = _normed(part.inner("q_layernorm"), query), _normed(part.inner("k_layernorm"), key)
    window = window_of(model, layer)
    rope = model.rope
    if window is not None and rope.local_base is not None:
        rope = RopeSection(base=rope.local_base)
    key = key.squeeze(3)
    if rotates(model, layer):
        query = rotated(query.flatten(2, 3), rows.positions, rope).view(*x.shape[:2], groups, shared, size)
        key = rotated(key, rows.positions, rope)
    scale = 1 / math.sqrt(size if model.query_scalar is None else model.query_scalar)
    scores = torch.einsum("bqghd,bkgd->bghqk", query, key) * scale
    sinks = part.get("core_attention.softmax_offset")
    weights = _softmax(scores, visible(rows, window), None if sinks is None else sinks.view(groups, shared))
    return torch.einsum("bghqk,bkgd->bqghd", weights, value.squeeze(3)).flatten(2)


def _normed(part: Module, heads: Tensor) -> Tensor:
    """[batch, seq, groups, heads, size] with every head normalised, or all of them together."""
    if part.model.qk_norm_width == "head":
        return norm(part, heads)
    return norm(part, heads.flatten(2)).view(heads.shape)


def _softmax(scores: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of [batch, groups, heads, query, key]; a sink is one more logit of a head, which no value belongs to."""
    hidden = scores.masked_fill(~seen[:, None, None], -math.inf)
    if sinks is None:
        return hidden.softmax(-1)
    column = sinks[None, :, :, None, None].expand(*hidden.shape[:-1], 1)
    return torch.cat([hidden, column], dim=-1).softmax(-1)[..., :-1]


def _latent(part: Module, x: Tensor, rows: Rows) -> Tensor:
    mla, heads = part.model.mla, part.model.num_attention_heads
    assert mla is not None
    down = linear(part, "linear_kv_down_proj", x)
    latent = _latent_norm(part, "kv_layernorm", down[..., : mla.kv_lora_rank])
    shared = _turned(part.model, down[..., mla.kv_lora_rank :].unsqueeze(2), rows)
    if mla.q_lora_rank is None:
        queries = linear(part, "linear_q_proj", x)
    else:
        narrow = _latent_norm(part, "q_layernorm", linear(part, "linear_q_down_proj", x))
        queries = linear(part, "linear_q_up_proj", narrow)
    query = queries.view(*x.shape[:2], heads, -1)
    up = linear(part, "linear_kv_up_proj", latent).view(*x.shape[:2], heads, -1)
    key, value = up[..., : mla.qk_nope_head_dim], up[..., mla.qk_nope_head_dim :]
    plain = torch.einsum("bqhd,bkhd->bhqk", query[..., : mla.qk_nope_head_dim], key)
    turned = _turned(part.model, query[..., mla.qk_nope_head_dim :], rows)
    scores = (plain + torch.einsum("bqhd,bkd->bhqk", turned, shared.squeeze(2))) * _latent_scale(part.model)
    weights = _softmax(scores.unsqueeze(1), visible(rows, None), None).squeeze(1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


def _latent_norm(part: Module, name: str, x: Tensor) -> Tensor:
    mla = part.model.mla
    assert mla is not None
    return norm(part.inner(name), x, part.model.norm_epsilon if mla.norm_epsilon is None else mla.norm_epsilon)


def _turned(model: ModelSection, x: Tensor, rows: Rows) -> Tensor:
    """[batch, seq, heads, qk_rope_head_dim]; interleaved pairs (0, 1), (2, 3), ... are first moved to (i, i + half)."""
    apart = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1) if model.rope.interleaved else x
    return rotated(apart, rows.positions, model.rope)


def _latent_scale(model: ModelSection) -> float:
    assert model.mla is not None
    scale = 1 / math.sqrt(model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim)
    all_dim = model.rope.mscale_all_dim
    return scale if model.rope.scaling != "yarn" or all_dim is None else scale * growth(model.rope, all_dim) ** 2
