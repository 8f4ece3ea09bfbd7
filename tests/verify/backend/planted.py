"""Wrong candidates: our own layers with a known fault that the check must find; ranks find their functions here."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.groups import Groups
from mtrain.verify.backend.candidates import Candidate, torch_layers


def _late_documents(config: Config, groups: Groups) -> nn.Module:
    """The first token of a document belongs to the one before."""

    def shifted(layer: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        starts = options["attention_mask"]
        before = torch.cat((starts[:, :1], starts[:, :-1]), dim=1)
        return args, {**options, "attention_mask": torch.where(before > 0, before + 1, 0)}

    chunk = torch_layers(config, groups)
    for layer in unwrap(chunk).decoder.layers:
        layer.register_forward_pre_hook(shifted, with_kwargs=True)
    return chunk


def _without_window(config: Config, groups: Groups) -> nn.Module:
    """Attention sees all keys."""
    chunk = torch_layers(config, groups)
    for layer in unwrap(chunk).decoder.layers:
        layer.self_attention.core_attention.window = None
    return chunk


def _bf16_sums(config: Config, groups: Groups) -> nn.Module:
    """The weight gradient of the attention's output projection is added up over tokens in bfloat16."""
    chunk = torch_layers(config, groups)
    for layer in unwrap(chunk).decoder.layers:
        projection = layer.self_attention.linear_proj
        projection.forward = functools.partial(_projected, projection.weight)
    return chunk


def _projected(weight: Tensor, inputs: Tensor) -> tuple[Tensor, None]:
    return _NarrowSum.apply(inputs, weight), None


class _NarrowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        total = torch.zeros_like(weight, dtype=torch.bfloat16)
        for given, column in zip(inputs.flatten(0, 1), gradient.flatten(0, 1), strict=True):
            total += torch.outer(column, given).to(torch.bfloat16)
        return gradient @ weight, total.to(weight.dtype)


PLANTED = {
    each.name: each
    for each in (
        Candidate("document-boundary", _late_documents),
        Candidate("dropped-window", _without_window),
        Candidate("bf16-sums", _bf16_sums),
    )
}
"""Faults by name."""
