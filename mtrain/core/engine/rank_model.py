"""This rank's part of a model, on which every pass, save and load works."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from torch import nn

from mtrain.config import Config
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.engine.sharded_model import DataParallel, ShardedModel
from mtrain.core.engine.sharded_weights import ShardedWeights
from mtrain.core.layers.adapters.attach import attach
from mtrain.core.layers.build import build_chunks, in_precision, unwrap
from mtrain.core.layers.compiled import compile_layers
from mtrain.core.layers.divided_weights import divide_weights
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.layers.offload.activations import move_activations
from mtrain.core.layers.transformer_config import transformer_config
from mtrain.core.ranks.groups import Groups


@dataclass(frozen=True)
class RankModel:
    """This rank's part of the model and of its optimizer."""

    config: Config
    groups: Groups
    sharded: ShardedModel
    """Model chunks, with the gradients and weights shared with other data-parallel ranks."""
    optimizer: Optimizer

    @property
    def chunks(self) -> Sequence[nn.Module]:
        """Model chunks, one for each virtual pipeline stage."""
        return self.sharded.chunks


def build_rank_model(config: Config, groups: Groups, weights_follow: bool = False) -> RankModel:
    """Builds a model and its optimizer; see `build_model`."""
    sharded = build_model(config, groups, weights_follow)
    return RankModel(config, groups, sharded, Optimizer(config, sharded, groups))


def build_model(config: Config, groups: Groups, weights_follow: bool = False, in_float64: bool = False) -> ShardedModel:
    """Builds this rank's model chunks, one for each virtual stage, with initial weights that do not depend on the
    layout; see `build_chunks`.

    Collective over the world if `train.compile` asks for compiled layers. With `weights_follow` weights are nan until
    the caller loads or draws them.
    """
    translated, chunks = build_chunks(config, groups, in_float64)
    modules = [in_precision(config.train, translated, chunk) for chunk in chunks]
    sharded: ShardedModel
    match groups.layout.shard:
        case "weights" if config.adapter is None:
            sharded = ShardedWeights(config.train, config.optimizer, groups, translated.params_dtype, chunks)
        case "weights" | "optimizer":
            if groups.layout.shard == "weights":
                for chunk in chunks:
                    # trained parameters are few, and several sets of them take turns
                    divide_weights(chunk, groups, translated.params_dtype, only_frozen=True)
            sharded = DataParallel(config, groups, translated, modules, in_float64)
        case _ as never:
            assert_never(never)
    for chunk in chunks:
        # into buffers or rows, which an optimizer copies or rounds to its main weights
        draw_weights(chunk, config, groups, others_follow=weights_follow)
    compile_layers(sharded.chunks, config, groups)
    if config.train.offload_layers is not None:
        move_activations([chunk.decoder for chunk in chunks], config.train.offload_layers, groups.device)
    return sharded


def build_adapters(base: Sequence[nn.Module], config: Config, groups: Groups) -> ShardedModel:
    """Builds the adapters of `config` on chunks without adapters, and wraps these again."""
    assert config.adapter is not None, "the caller wants adapters"
    # megatron-core's callbacks are kept in it: each set has gradients and an optimizer of its own
    translated = transformer_config(config, groups.layout, groups.device)
    for chunk in base:
        attach(unwrap(chunk), config.model, config.adapter, groups.collection)
    modules: list[Any] = [chunk.module for chunk in base]  # without DDP
    return DataParallel(config, groups, translated, modules)
