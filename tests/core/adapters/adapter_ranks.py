"""Ranks of a model with adapters: saving, loading (also on another base), adapters off; for `test_adapter_state.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.checkpoint.state.base import base_of, settle_base
from mtrain.checkpoint.state.gather import parameter_shards
from mtrain.checkpoint.state.load import load_checkpoint, load_weights, save_checkpoint
from mtrain.checkpoint.store.directory import checkpoint_at
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.rank_model import RankModel, build_model, build_rank_model
from mtrain.core.engine.schedule import run_forward
from mtrain.core.layers.adapters.adapter import adapters_off
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.output_layer import Logits
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.samples import Batches, SamplePlan
from mtrain.verify.core.weights import drawn, set_weights
from tests.core.state.gathering import gather_whole

Weights = dict[str, Tensor]


class Loaded(NamedTuple):
    """What a rank has after loading."""

    weights: Weights | None
    """Weights of the whole model on rank 0; None on others."""
    fingerprint: str
    refusals: list[str]
    """Messages that refused another base, and a folder of adapters where a model was needed."""


def save(groups: Groups, config: Config, folder: Path) -> tuple[Weights | None, str]:
    """Saves drawn adapters, none of them zero; returns the weights (on rank 0) and the base's fingerprint."""
    sharded = build_model(config, groups)
    chunks = sharded.chunks
    set_weights(chunks, groups, lambda name, shape: drawn(name, shape, config) if "_adapter." in name else None)
    model = RankModel(config, groups, sharded, Optimizer(config, sharded, groups))
    save_checkpoint(folder / "checkpoints", model, step=1)
    base = base_of(model)
    assert base is not None
    return gather_whole(parameter_shards(chunks, groups)), base.fingerprint


def load(groups: Groups, config: Config, folder: Path) -> Loaded:
    """Loads what `save` wrote, then tries again on a base that differs in one bit."""
    model = build_rank_model(config, groups)
    chunks = model.chunks
    settle_base(model)
    entry = checkpoint_at(folder).entry
    assert entry is not None
    load_checkpoint(entry, model)
    found = gather_whole(parameter_shards(chunks, groups))
    base = base_of(model)
    assert base is not None
    refusals = []
    with torch.no_grad():
        for part in sharded_tensors(unwrap(chunks[0]), groups):
            row = 3 - part.global_offset[0]
            if part.key == "embedding.word_embeddings.weight" and 0 <= row < len(part.data):
                part.data[row, 5] = torch.nextafter(part.data[row, 5], torch.tensor(9.0))
    settle_base(model)
    for attempt in (load_checkpoint, load_weights):
        try:
            attempt(entry, model)
        except DataError as error:
            refusals.append(str(error))
    return Loaded(found, base.fingerprint, refusals)


def logits(groups: Groups, config: Config) -> dict[str, Tensor]:
    """Returns the logits of one microbatch with drawn adapters, without them, and of a model that never had any."""
    chunks = build_model(config, groups).chunks
    set_weights(chunks, groups, lambda name, shape: drawn(name, shape, config) if "_adapter." in name else None)
    plain = build_model(config.model_copy(update={"adapter": None}), groups).chunks
    batch = Batches(config, SamplePlan(0, 1), 0, 1).of_step(0)[0]
    found = {"on": logits_of(chunks, batch, config)}
    with adapters_off(chunks):
        found["off"] = logits_of(chunks, batch, config)
    return found | {"plain": logits_of(plain, batch, config), "on again": logits_of(chunks, batch, config)}


def logits_of(chunks: Sequence[torch.nn.Module], batch: Microbatch, config: Config) -> Tensor:
    found: list[Tensor] = []

    def take(logits: Logits, batch: Microbatch) -> None:
        found.append(logits.main.whole())

    run_forward(chunks, [batch], take, config)
    return found[0]


def parameters(groups: Groups, config: Config) -> dict[str, Tensor]:
    """Returns this rank's parameters by their name in the first chunk."""
    (chunk,) = build_model(config, groups).chunks
    return {name: each.detach().clone() for name, each in unwrap(chunk).named_parameters()}


def main_weights(groups: Groups, config: Config) -> list[tuple[int, torch.dtype]]:
    """Returns sizes and dtypes of what the optimizer updates: the adapters alone, as everything else is frozen."""
    model = build_rank_model(config, groups)
    held = [each for group in model.optimizer.inner.param_groups for each in group["params"]]
    trained = sum(each.numel() for chunk in model.chunks for each in chunk.parameters() if each.requires_grad)
    assert sum(each.numel() for each in held) <= trained
    return [(each.numel(), each.dtype) for each in held]
