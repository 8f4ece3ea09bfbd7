"""Replay of given experts in the reference of `mtrain verify`, whose choice is replaced from outside."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.sample import Sample
from mtrain.verify.reference.model import experts


def weights_of(logits: Tensor, places: Tensor, section: ExpertsSection) -> Tensor:
    """Returns the weights of given experts from a router's own logits, [..., top_k], from the definitions."""
    match section.score:
        case "sigmoid":
            scores = 1 / (1 + torch.exp(-logits.gather(-1, places)))
            if section.top_k > 1:
                scores = scores / scores.sum(-1, keepdim=True)
        case "softmax":
            powers = torch.exp(logits - logits.max(-1, keepdim=True).values)
            chosen = powers.gather(-1, places)
            scores = chosen / (powers if section.pre_softmax else chosen).sum(-1, keepdim=True)
        case _:
            assert_never(section.score)
    return scores * section.scaling_factor


@contextlib.contextmanager
def replaying(batch: Sequence[Sample], model: ModelSection) -> Iterator[None]:
    """Makes the reference take the experts that samples name, in its next forward pass; depths choose themselves."""
    if not any(sample.choices for sample in batch):
        yield
        return
    assert model.experts is not None
    own_choice, section = experts.routed, model.experts
    width = max(sample.width for sample in batch)
    given = np.full((len(batch), width, model.num_layers, section.top_k), -1)
    for row, sample in zip(given, batch, strict=True):
        if ROUTED_EXPERTS in sample.choices:
            row[: sample.width] = sample.choices[ROUTED_EXPERTS]
    routers = itertools.count()
    layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]

    def routed(
        logits: Tensor, expert_bias: Tensor | None, section: ExpertsSection, named: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert named is None, "the reference's own replay, which is not used here"
        chosen, weights = own_choice(logits, expert_bias, section)
        number = next(routers)
        if number >= len(layers):
            return chosen, weights
        places = torch.from_numpy(given[:, :, layers[number]]).to(torch.int64)
        is_given, places = (places >= 0).all(-1, keepdim=True), places.clamp(min=0)
        taken = torch.zeros_like(logits).scatter(-1, places, weights_of(logits, places, section))
        return torch.where(is_given, taken != 0, chosen), torch.where(is_given, taken, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "routed", routed)
        yield
    assert next(routers) >= len(layers), "the reference has routed"


def drawn_routes(rng: np.random.Generator, num_tokens: int, model: ModelSection) -> NDArray[Any]:
    """Draws other experts than a router would choose, some often and some seldom, [tokens, layers, top_k]; -1 for one
    token in four of a layer, and numbers that mean nothing in dense layers."""
    assert model.experts is not None
    section = model.experts
    shape = (num_tokens, model.num_layers, section.num_experts)
    found = (rng.random(shape) + np.linspace(0.0, 1.0, section.num_experts)).argsort(-1)[..., : section.top_k]
    found[rng.random(shape[:2]) < 0.25] = -1
    found[:, [layer for layer in range(model.num_layers) if not model.has_experts(layer)]] = 0
    return found.astype(np.int32)


def with_routes(batch: Sequence[Sample], model: ModelSection, seed: int = 5) -> list[Sample]:
    """Returns the samples with experts drawn at random; one sample in five names none."""
    rng = np.random.default_rng(seed)
    return [
        sample if slot % 5 == 3 else replace(sample, choices={ROUTED_EXPERTS: drawn_routes(rng, sample.width, model)})
        for slot, sample in enumerate(batch)
    ]
