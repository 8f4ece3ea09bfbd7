"""Multi-head latent attention as plain float64 functions: every head written out, nothing shared with mtrain.

Source: DeepSeek-V2, arXiv 2405.04434, equations 9 to 19; the softmax scale and the norms of the latents are those of
the released models.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mtrain.config.schema.model import LatentAttentionSection, ModelSection

Parameters = dict[str, Tensor]
BlendPosition = Callable[[Tensor], Tensor]
"""Rotates pairs (i, i + half) of [documents, length, heads, size]."""


def shapes(name: str, model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Returns the weights of the module called `name`: megatron-core's name -> global shape."""
    mla = sizes_of(model)
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    found: dict[str, tuple[int, ...]] = {}
    if mla.q_lora_rank is None:
        found["linear_q_proj.weight"] = (query, hidden)
    else:
        found["linear_q_down_proj.weight"] = (mla.q_lora_rank, hidden)
        found |= _norm_shapes("q_layernorm", mla.q_lora_rank, model)
        found["linear_q_up_proj.weight"] = (query, mla.q_lora_rank)
    found["linear_kv_down_proj.weight"] = (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)
    found |= _norm_shapes("kv_layernorm", mla.kv_lora_rank, model)
    found["linear_kv_up_proj.weight"] = (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    found["linear_proj.weight"] = (hidden, heads * mla.v_head_dim)
    return {f"{name}.{key}": shape for key, shape in found.items()}


def attention(parameters: Parameters, name: str, model: ModelSection, x: Tensor, rotate: BlendPosition) -> Tensor:
    """Computes causal attention: [documents, length, hidden] -> the same.

    Args:
        parameters: Parameters by global name.
        name: Name of the module.
        model: Section of the architecture.
        x: Normalized hidden states.
        rotate: Rotary embedding, with yarn's attention factor.
    """
    mla, heads = sizes_of(model), model.num_attention_heads
    weights = {key.removeprefix(f"{name}."): value for key, value in parameters.items() if key.startswith(f"{name}.")}
    down = x @ weights["linear_kv_down_proj.weight"].T
    latent = _normed(weights, "kv_layernorm", down[..., : mla.kv_lora_rank], model)
    shared_key = rotate(_pairs(down[..., mla.kv_lora_rank :].unsqueeze(2), model)).squeeze(2)
    if mla.q_lora_rank is None:
        query = x @ weights["linear_q_proj.weight"].T
    else:
        narrow = _normed(weights, "q_layernorm", x @ weights["linear_q_down_proj.weight"].T, model)
        query = narrow @ weights["linear_q_up_proj.weight"].T
    query = query.view(*x.shape[:2], heads, -1)
    rotated = rotate(_pairs(query[..., mla.qk_nope_head_dim :], model))
    up = weights["linear_kv_up_proj.weight"].view(heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    contexts = []
    for head in range(heads):
        key = latent @ up[head, : mla.qk_nope_head_dim].T
        value = latent @ up[head, mla.qk_nope_head_dim :].T
        scores = query[:, :, head, : mla.qk_nope_head_dim] @ key.mT + rotated[:, :, head] @ shared_key.mT
        contexts.append((scores * _scale(model)).masked_fill(future, -math.inf).softmax(-1) @ value)
    return torch.cat(contexts, dim=-1) @ weights["linear_proj.weight"].T


def sizes_of(model: ModelSection) -> LatentAttentionSection:
    """Returns the section of latent attention, which must be there."""
    assert model.mla is not None
    return model.mla


def _scale(model: ModelSection) -> float:
    mla, rope = sizes_of(model), model.rope
    scale = float((mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5)
    if rope.scaling == "yarn" and rope.mscale_all_dim is not None:
        scale *= (1 + 0.1 * rope.mscale_all_dim * math.log(rope.factor)) ** 2
    return scale


def _pairs(x: Tensor, model: ModelSection) -> Tensor:
    """Moves pairs (0, 1), (2, 3), ... to (i, i + half), for queries and keys alike, so that their products stay."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if model.rope.interleaved else x


def _norm_shapes(name: str, size: int, model: ModelSection) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (size,) for part in (("weight", "bias") if model.norm == "layernorm" else ("weight",))}


def _normed(weights: Parameters, name: str, x: Tensor, model: ModelSection) -> Tensor:
    """Normalizes a latent like the model's other activations; published models use RMSNorm."""
    epsilon = sizes_of(model).norm_epsilon or model.norm_epsilon
    gain = 1 + weights[f"{name}.weight"] if model.zero_centered_norm else weights[f"{name}.weight"]
    if model.norm == "rmsnorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gain
    spread = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + epsilon)
    return (x - x.mean(-1, keepdim=True)) * spread * gain + weights[f"{name}.bias"]
