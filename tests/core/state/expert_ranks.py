"""What every rank does in tests of the state of experts; the functions for `Pool.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.checkpoint.state.load import load_checkpoint, load_weights, save_checkpoint
from mtrain.config import Config
from mtrain.core.engine.rank_model import build_model
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.all_reduce import AsyncAllReduce
from mtrain.core.ranks.groups import Groups
from tests.core.state.checkpoint_ranks import Arrays, Parts, _arrays, _entry, build
from tests.core.state.gathering import gather_whole


def initial_weights(groups: Groups, config: Config) -> Arrays:
    """Returns the whole tensors on rank 0."""
    return _arrays(gather_whole(parameter_shards(build_model(config, groups).chunks, groups)))


def save_with_biases(groups: Groups, config: Config, folder: Path) -> None:
    """Saves initial weights whose biases of the expert choice encode their layer and expert."""
    parts = build(groups, config)
    for router in routers(parts):
        bias: Any = router.expert_bias
        number: Any = router.layer_number
        bias.copy_(number + torch.arange(len(bias)) / 1024)
    save_checkpoint(folder, parts.model, 1)


def loaded_biases(groups: Groups, config: Config, folder: Path) -> tuple[Arrays, Arrays]:
    """Returns the biases in a run that resumes, and in one that starts from the weights."""
    resumed, started = build(groups, config), build(groups, config)
    load_checkpoint(_entry(folder, 1), resumed.model)
    load_weights(_entry(folder, 1), started.model)
    return _biases(resumed, groups), _biases(started, groups)


def routers(parts: Parts) -> list[torch.nn.Module]:
    """Returns the routers of this rank."""
    layers = [layer for chunk in parts.model.chunks for layer in unwrap(chunk).decoder.layers]
    return [layer.mlp.router for layer in layers if layer.is_moe_layer]


def _biases(parts: Parts, groups: Groups) -> Arrays:
    whole = _arrays(gather_whole(parameter_shards(parts.model.chunks, groups)))
    return {name: values for name, values in whole.items() if name.endswith("expert_bias")}


def loss_scales_after_an_overflow(groups: Groups, config: Config) -> list[float]:
    """Makes an expert's gradient overflow on the last rank, twice; returns this rank's scales of all optimizers."""
    parts = build(groups, config)
    for _ in range(2):
        parts.model.optimizer.zero_grad()
        if groups.rank == dist.get_world_size() - 1:
            layers = [layer for chunk in parts.model.chunks for layer in unwrap(chunk).decoder.layers]
            layers[-1].mlp.experts.linear_fc1.weight.main_grad.fill_(float("inf"))
        norm_sq = AsyncAllReduce(parts.model.optimizer.local_grad_norm_sq().view(1)).get()
        assert parts.model.optimizer.update(0.01, float(norm_sq)).overflowed
    return [float(part.grad_scaler.scale) for part in parts.model.optimizer.inner.chained_optimizers]
