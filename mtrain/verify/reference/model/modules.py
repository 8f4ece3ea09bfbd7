"""Norms, projections and activations, and the lookup of their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection

_CLAMP, _SLOPE = 7.0, 1.702
"""Constants of GPT-OSS: bound of both projections, slope of the gate."""


@dataclass(frozen=True)
class ExpertChanges:
    """Deviations of another program in layers of experts; none by default."""

    router_dtype: torch.dtype | None = None
    """Precision of a router's input, weight and logits; None: not rounded."""
    num_partial_sums: int = 1
    """Ranks that each round the sum of their experts to bfloat16; 1: no rounding."""
    chosen: Mapping[str, Tensor] = field(default_factory=dict)
    """Replayed choices by router, [batch, seq, experts] bool; routers choose for tokens without any."""


AS_DEFINED = ExpertChanges()


@dataclass(frozen=True)
class Module:
    """Module of the model: a prefix of tensor names."""

    model: ModelSection
    tensors: Mapping[str, Tensor]
    """All tensors of the model by name, float64."""
    name: str
    changes: ExpertChanges = AS_DEFINED

    def inner(self, name: str) -> Module:
        """Returns a submodule."""
        return replace(self, name=f"{self.name}.{name}")

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor of this module, which must exist."""
        return self.tensors[f"{self.name}.{name}"]

    def get(self, name: str) -> Tensor | None:
        """Returns a tensor of this module, or None."""
        return self.tensors.get(f"{self.name}.{name}")


def linear(part: Module, name: str, x: Tensor) -> Tensor:
    """Computes x W^T, plus the bias if any."""
    bias = part.get(f"{name}.bias")
    product = x @ part.tensor(f"{name}.weight").T
    return product if bias is None else product + bias


def norm(part: Module, x: Tensor, epsilon: float | None = None) -> Tensor:
    """Applies RMSNorm or LayerNorm to the last axis; epsilon None: the model's."""
    model = part.model
    match model.norm:
        case "layernorm":
            x = x - x.mean(-1, keepdim=True)
        case "rmsnorm":
            pass
        case _:
            assert_never(model.norm)
    spread = torch.sqrt((x * x).mean(-1, keepdim=True) + (model.norm_epsilon if epsilon is None else epsilon))
    gain, bias = part.tensor("weight"), part.get("bias")
    scaled = x / spread * (1 + gain if model.zero_centered_norm else gain)
    return scaled if bias is None else scaled + bias


def network(part: Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a feed-forward network; returns its output without and with the second bias."""
    inner = activated(part.model, linear(part, "linear_fc1", x))
    product, bias = inner @ part.tensor("linear_fc2.weight").T, part.get("linear_fc2.bias")
    return product, product if bias is None else product + bias


def activated(model: ModelSection, x: Tensor) -> Tensor:
    """Applies the activation, [..., ffn], or [..., 2 ffn] if gated, -> [..., ffn]."""
    match model.activation:
        case "gelu":
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return _gelu_tanh(x)
        case "relu2":
            return torch.where(x > 0, x * x, 0)
    gate, up = x.chunk(2, dim=-1)
    match model.activation:
        case "swiglu":
            return silu(gate) * up
        case "geglu_tanh":
            return _gelu_tanh(gate) * up
        case "swiglu_clamped":
            gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
            return (up + 1) * gate / (1 + torch.exp(-_SLOPE * gate))
        case _:
            assert_never(model.activation)


def silu(x: Tensor) -> Tensor:
    """Computes x sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor) -> Tensor:
    """Convolves the channels of [batch, seq, channels] within documents, [batch, seq], and applies silu.

    The last column of `weight`, [channels, taps], belongs to the token itself.
    """
    length, taps = x.shape[1], weight.shape[1]
    total = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
    for back in range(min(taps, length)):
        is_same = documents[:, back:] == documents[:, : length - back]
        total[:, back:] += x[:, : length - back] * weight[:, taps - 1 - back] * is_same[..., None]
    return silu(total)


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
