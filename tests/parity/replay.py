"""Choices of experts in the reference of `mtrain verify`, replaced from outside: replayed, or cut by a capacity."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.sample import Sample
from mtrain.data.loader import Given, RowsOfRank
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


Part = list[tuple[int, int]]
"""The tokens of a microbatch on a rank, as samples and positions."""


def parts_of_ranks(batch: Sequence[Sample], config: Config, layout: Layout) -> tuple[list[Part], int]:
    """Returns the parts of all ranks and microbatches that have any token, and the positions of a part."""
    plan = RowsOfRank(config, 0, layout.dp).plan(Given(batch), len(batch))
    width, chunk = config.row_width, config.row_width // (2 * layout.cp)
    shared = layout.tp if layout.sp else 1
    found = defaultdict[tuple[int, int, int], Part](list)
    for slot, (row, begin) in Given(batch).positions(plan, layout.dp).items():
        for position in range(len(batch[slot].tokens)):  # its width is 1 even without text
            number, rest = divmod(begin + position, chunk)
            owner = min(number, 2 * layout.cp - 1 - number)
            own = rest + (chunk if number >= layout.cp else 0)
            key = (row // config.train.micro_batch_size, owner, own * layout.cp * shared // width)
            found[key].append((slot, position))
    return list(found.values()), config.train.micro_batch_size * width // (layout.cp * shared)


@contextlib.contextmanager
def dropping(batch: Sequence[Sample], config: Config, layout: Layout) -> Iterator[list[int]]:
    """Makes experts of the reference drop tokens as in a run on a layout; yields the numbers of dropped choices.

    The capacity of an expert is ceil(positions x top_k / experts x factor) tokens, of the positions that a rank has of
    a microbatch. Beyond it, the tokens of text that weigh an expert least leave it.
    """
    parts, size = parts_of_ranks(batch, config, layout)
    whole_choice, dropped = experts.routed, list[int]()

    def routed(
        logits: Tensor, expert_bias: Tensor | None, section: ExpertsSection, named: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        chosen, weights = whole_choice(logits, expert_bias, section, named)
        assert section.capacity_factor is not None
        capacity = math.ceil(size * section.top_k / section.num_experts * section.capacity_factor)
        stays = chosen.clone()
        for part in parts:
            slots, positions = map(torch.tensor, zip(*part, strict=True))
            for expert in range(section.num_experts):
                ranking, order = weights[slots, positions, expert].detach().sort(descending=True)
                last = order[capacity:]
                if len(last) and ranking[capacity] > 0:
                    # equal tokens at the beginning of documents differ by rounding
                    assert ranking[capacity - 1] > (1 + 1e-9) * ranking[capacity], "a tie"
                stays[slots[last], positions[last], expert] = False
        dropped.append(int((chosen & ~stays).sum()))
        return stays, weights * stays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "routed", routed)
        yield dropped
