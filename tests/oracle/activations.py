"""Activations between the two projections of a feed-forward part, written out."""

import math

import torch
from torch import Tensor

GATED = {"swiglu", "swiglu_clamped", "geglu_tanh"}
"""Activations whose first projection gives the gate, followed by the values that it multiplies."""


def activate(activation: str, projected: Tensor) -> Tensor:
    """Maps [..., ffn], or [..., 2 ffn] where gated, to [..., ffn]."""
    if activation not in GATED:
        return _gelu(projected) if activation == "gelu" else _gelu_tanh(projected)
    gate, up = projected.chunk(2, dim=-1)
    match activation:
        case "swiglu":
            return gate * torch.sigmoid(gate) * up
        case "geglu_tanh":
            return _gelu_tanh(gate) * up
    gate, up = torch.where(gate > 7, 7.0, gate), torch.where(up.abs() > 7, 7.0 * up.sign(), up)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
