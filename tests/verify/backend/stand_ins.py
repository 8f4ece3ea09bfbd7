"""Candidates that stand in for other libraries; ranks find their functions here."""

from __future__ import annotations

import sys
import types
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from mtrain.config import Config
from mtrain.core import kernels
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.groups import Groups
from mtrain.verify.backend.candidates import CANDIDATES, Candidate, torch_layers
from tests.verify.backend import delta_rule_semantics


def _in_other_order(config: Config, groups: Groups) -> nn.Module:
    """Multiplies the columns of each output projection in reverse, so that sums round otherwise."""
    chunk = torch_layers(config, groups)
    for layer in unwrap(chunk).decoder.layers:
        projection = layer.self_attention.linear_proj
        original = projection.forward

        def forward(inputs: torch.Tensor, original: object = original) -> object:
            half = inputs.shape[-1] // 2
            first, second = inputs.clone(), inputs.clone()
            first[..., half:], second[..., :half] = 0, 0
            return original(second)[0] + original(first)[0], None  # type: ignore[operator]

        projection.forward = forward
    return chunk


def _captured(config: Config, groups: Groups) -> nn.Module:
    """Compiles the layers with a backend that needs no compiler."""
    kernels.BACKEND = "eager"
    return _named("compile").build(config, groups)


def _crashing(config: Config, groups: Groups) -> nn.Module:
    raise RuntimeError("no kernel image is available")


def _never_here(config: Config, device: torch.device) -> str | None:
    return f"made for no {device.type}"


def _by_flash_attention(config: Config, groups: Groups) -> nn.Module:
    """Builds the candidate with what flash-attn documents of its function."""
    sys.modules["flash_attn"] = types.SimpleNamespace(flash_attn_varlen_func=_attended)  # type: ignore[assignment]
    try:
        return _named("flash-attn").build(config, groups)
    finally:
        del sys.modules["flash_attn"]


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    assert causal
    ends = cu_seqlens_q.tolist()
    assert ends == cu_seqlens_k.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    found = []
    for parts in zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True):
        places = torch.arange(len(parts[0]))
        distance = places[:, None] - places
        seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        queries, keys, values = (part.transpose(0, 1) for part in parts)
        output = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        found.append(output.transpose(0, 1))
    return torch.cat(found)


def _by_delta_rule(kernel: object, config: Config, groups: Groups) -> nn.Module:
    """Builds the candidate with what flash-linear-attention documents of its function, or with a wrong one."""
    parent, kernels = "fla.ops", types.SimpleNamespace(chunk_gated_delta_rule=kernel)
    modules = {"fla": types.ModuleType("fla"), parent: types.ModuleType(parent), f"{parent}.gated_delta_rule": kernels}
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        return _named("fla").build(config, groups)
    finally:
        for name in modules:
            del sys.modules[name]


def _by_apex(config: Config, groups: Groups) -> nn.Module:
    """Builds the candidate with what apex documents of its functions."""
    kernels = types.SimpleNamespace(fused_rms_norm_affine=_rms_norm, fused_layer_norm_affine=_layer_norm)
    sys.modules["apex"] = sys.modules["apex.normalization"] = types.ModuleType("apex")
    sys.modules["apex.normalization.fused_layer_norm"] = kernels  # type: ignore[assignment]
    try:
        return _named("apex").build(config, groups)
    finally:
        del sys.modules["apex"], sys.modules["apex.normalization"], sys.modules["apex.normalization.fused_layer_norm"]


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], eps: float) -> torch.Tensor:
    return functional.rms_norm(hidden.float(), shape, weight.float(), eps).to(hidden.dtype)


def _layer_norm(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: tuple[int, ...], eps: float
) -> torch.Tensor:
    return functional.layer_norm(hidden.float(), shape, weight.float(), bias.float(), eps).to(hidden.dtype)


def _named(name: str) -> Candidate:
    return next(each for each in CANDIDATES if each.name == name)


FLASH_ATTENTION = Candidate("flash-attn", _by_flash_attention)
DELTA_RULES = tuple(
    Candidate("fla", partial(_by_delta_rule, kernel))
    for kernel in (
        delta_rule_semantics.chunk_gated_delta_rule,
        delta_rule_semantics.without_documents,
        delta_rule_semantics.without_scale,
    )
)
"""The delta rule by its documentation; one that carries states over documents; one without its scale."""
APEX = Candidate("apex", _by_apex)
STAND_IN = Candidate("stand-in", _in_other_order)
CAPTURED = Candidate("captured", _captured)
CRASHING = Candidate("crashing", _crashing)
ABSENT = Candidate("absent", _in_other_order, _never_here)
