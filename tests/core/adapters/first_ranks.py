"""Ranks that start a model with adapters as a run does, and the frozen model alone; for `test_first_values.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.config import Config
from mtrain.core.engine.rank_model import build_rank_model
from mtrain.core.layers.adapters.adapter import adapters_off, is_adapter_key
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import draw_adapters
from mtrain.core.ranks.groups import Groups
from mtrain.training.resume import initialize
from mtrain.verify.core.samples import Batches, SamplePlan
from tests.core.adapters.adapter_ranks import Weights, logits_of
from tests.core.state.gathering import gather_whole


class First(NamedTuple):
    """A model with adapters at its first step, on rank 0."""

    adapters: Weights
    """Parameters of the adapters."""
    again: Weights
    """The same after further adapters on this base were drawn with the seed of the run."""
    logits: Tensor
    of_base: Tensor
    """Logits of the frozen model alone."""


def first_values(groups: Groups, configs: list[Config]) -> list[First]:
    """Starts each run up to its first step."""
    return [_first(groups, config) for config in configs]


def _first(groups: Groups, config: Config) -> First:
    is_loaded = config.model.hf is not None or config.checkpoint.initialize_from is not None
    model = build_rank_model(config, groups, weights_follow=is_loaded)
    initialize(model)
    chunks = model.chunks
    adapters = _adapters(chunks, groups)
    batch = Batches(config, SamplePlan(0, 1), 0, 1).of_step(0)[0]
    logits = logits_of(chunks, batch, config)
    with adapters_off(chunks):
        of_base = logits_of(chunks, batch, config)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.data.fill_(torch.nan)
        draw_adapters(unwrap(chunk), config.model, groups, config.train.seed)
    return First(adapters, _adapters(chunks, groups), logits, of_base)


def _adapters(chunks: Sequence[torch.nn.Module], groups: Groups) -> Weights:
    weights = gather_whole(parameter_shards(chunks, groups)) or {}
    return {name: value.clone() for name, value in weights.items() if is_adapter_key(name)}
