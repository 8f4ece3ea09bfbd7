"""Candidates that stand in for other libraries; ranks find their functions here."""

from __future__ import annotations

import torch
from torch import nn

from mtrain.mcore.model import compiled
from mtrain.mcore.model.build import unwrap
from mtrain.verify.backend.candidates import CANDIDATES, Candidate, Place, torch_layers


def _in_other_order(place: Place) -> nn.Module:
    """Multiplies the columns of each output projection in reverse, so that sums round otherwise."""
    chunk = torch_layers(place)
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


def _captured(place: Place) -> nn.Module:
    """Compiles the layers with a backend that needs no compiler."""
    compiled.BACKEND = "eager"
    return next(each for each in CANDIDATES if each.name == "compile").build(place)


def _crashing(place: Place) -> nn.Module:
    raise RuntimeError("no kernel image is available")


def _never_here(place: Place) -> str | None:
    return f"made for no {place.groups.device.type}"


STAND_IN = Candidate("stand-in", "layers that add in another order", _in_other_order)
CAPTURED = Candidate("captured", "layers captured by torch.compile", _captured)
CRASHING = Candidate("crashing", "layers that raise", _crashing)
ABSENT = Candidate("absent", "layers for another device", _in_other_order, _never_here)
