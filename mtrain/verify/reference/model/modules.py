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
"""Constants of GPT-OSS: bound of both projections, and slope of the gate."""


@dataclass(frozen=True)
class ExpertChanges:
    """Ways in which another program computes layers of experts; by default as defined."""

    router_dtype: torch.dtype | None = None
    """Precision to which a router's input, weight and logits are rounded; None: not at all."""
    num_partial_sums: int = 1
    """Number of ranks that each add up the experts that they hold and round this sum to bfloat16; 1: no rounding."""
    chosen: Mapping[str, Tensor] = field(default_factory=dict)
    """Choices to replay by name of the router, [batch, seq, experts] bool; the router makes the others."""


AS_DEFINED = ExpertChanges()


@dataclass(frozen=True)
class Module:
    """Module of the model: a prefix of tensor names."""

    model: ModelSection
    tensors: Mapping[str, Tensor]
    """All tensors of the model by name, float64."""
    name: str
    """Name of this module."""
    changes: ExpertChanges = AS_DEFINED

    def inner(self, name: str) -> Module:
        """Returns a submodule."""
        return replace(self, name=f"{self.name}.{name}")

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor of this module, which must exist."""
        return self.tensors[f"{self.name}.{name}"]

    def get(self, name: str) -> Tensor | None:
        """Returns a tensor of this module; None if there is none."""
        return self.tensors.get(f"{self.name}.{name}")


def linear(part: Module, name: str, x: Tensor) -> Tensor:
    """Computes x W^T, plus the bias if there is one."""
    bias = part.get(f"{name}.bias")
    product = x @ part.tensor(f"{name}.weight").T
    return product if bias is None else product + bias


def norm(part: Module, x: Tensor, epsilon: float | None = None) -> Tensor:
    """Applies RMSNorm or LayerNorm to the last axis; by default with the model's epsilon."""
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
    """Computes a feed-forward network; returns its output without and with the bias of the second projection."""
    inner = activated(part.model, linear(part, "linear_fc1", x))
    product, bias = inner @ part.tensor("linear_fc2.weight").T, part.get("linear_fc2.bias")
    return product, product if bias is None else product + bias


def activated(model: ModelSection, x: Tensor) -> Tensor:
    """Applies the activation between the two projections, [..., ffn], or [..., 2 ffn] if gated, -> [..., ffn]."""
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


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
