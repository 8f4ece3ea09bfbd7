"""Initial weights that do not depend on the layout.

Every weight is drawn by its global name and position: each block of rows of the global tensor has a generator seeded by
(seed, name, block). A rank draws the blocks that overlap with its shard and slices its part out of them.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mtrain.arch.features import present
from mtrain.base.background import mapped
from mtrain.base.environment import cores_of_rank
from mtrain.base.tensor_slice import Sizes
from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.adapters.adapter import first_deviation, is_adapter_key
from mtrain.core.layers.layer_parts import MODULES
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import held_values, sharded_parameters, shards
from mtrain.core.ranks.groups import Groups

# part of the definition of initial weights: another size would draw another model from the same seed
_ROWS_PER_BLOCK = 256
_EMBEDDING = "embedding.word_embeddings.weight"
_VOCABULARY = (_EMBEDDING, "output_layer.weight")


def sharded_tensors(
    module: MegatronModule, groups: Groups, value_of: Callable[[Tensor], Tensor | None] = lambda parameter: parameter
) -> Iterator[ShardedTensor]:
    """Yields this rank's parameters and buffers with their global names, shapes and offsets; fused ones are split.

    `value_of` may replace a parameter by another tensor of its shape, or leave it out (None). For a sharded parameter,
    yields the float32 rows that this rank holds.
    """
    for parameter in sharded_parameters([module], groups):
        values = value_of(parameter.data)
        if values is not None:
            yield from shards(
                parameter, parameter.key, held_values(parameter.data) if values is parameter.data else values
            )


@torch.no_grad()
def draw_weights(module: MegatronModule, config: Config, groups: Groups, others_follow: bool = False) -> None:
    """Draws matrices from a normal distribution, and parameters in `Modules.first_values` like transformers.

    Norms (ones) and biases (zeros) stay as built. The standard deviation is model.init_std, except for projections back
    into the residual stream (see the key). Rows that pad the vocabulary are zero. One matrix of an adapter is drawn
    with PEFT's variance, and the other stays zero. With `others_follow`, only heads and adapters are drawn, which files
    of weights may lack; everything else is nan until it is loaded, so that forgotten values cannot pass for weights.
    """
    for shard in sharded_tensors(module, groups):
        name, shape, offset = _whole(shard)
        transformed = _transformation(name, config.model)
        deviation = 1.0 if transformed is not None else _deviation(name, shape, config.model)
        if deviation == 0 or (len(shape) < 2 and transformed is None):
            continue
        if name == "output_layer.weight" and config.model.output.is_tied:
            # draws the last stage's copy of a tied table like the first stage's, without a broadcast
            name = _EMBEDDING
        if others_follow and not _may_lack(name, config.model):
            shard.data.fill_(math.nan)
        else:
            # on the host; a GPU then gets the whole shard in one copy
            host = shard.data if shard.data.is_cpu else torch.empty(shard.local_shape, dtype=shard.data.dtype)
            draw(host, f"{config.train.seed}:{name}", shape, offset, deviation, cores_of_rank(os.environ))
            if transformed is not None:
                # the distribution function maps normal numbers to uniform ones
                host.copy_(transformed(torch.special.ndtr(host.float())))
            if host is not shard.data:
                shard.data.copy_(host)
        if name in _VOCABULARY:
            # the number of padding rows depends on tp
            shard.data[max(0, config.model.vocab_size - offset[0]) :] = 0.0


@torch.no_grad()
def draw_adapters(module: MegatronModule, model: ModelSection, groups: Groups, seed: int) -> None:
    """Sets the adapters of a frozen model to their initial values, like `draw_weights` with train.seed=`seed`."""
    for shard in sharded_tensors(module, groups, lambda parameter: parameter if parameter.requires_grad else None):
        name, shape, offset = _whole(shard)
        # magnitudes of DoRA and fully trained parameters follow from the frozen model
        if len(shape) < 2 or not _may_lack(name, model):
            continue
        host = torch.zeros(shard.local_shape, dtype=shard.data.dtype)
        deviation = _deviation(name, shape, model)
        if deviation:
            draw(host, f"{seed}:{name}", shape, offset, deviation, cores_of_rank(os.environ))
        shard.data.copy_(host)


def _whole(shard: ShardedTensor) -> tuple[str, Sizes, Sizes]:
    """Returns name, shape and offset of the whole parameter, without the axes that stack layers and experts."""
    axes = shard.prepend_axis_num
    name = global_name(shard.key, tuple(shard.global_offset[:axes]))
    return name, tuple(shard.global_shape[axes:]), tuple(shard.global_offset[axes:])


def _may_lack(name: str, model: ModelSection) -> bool:
    """Says whether weight files of a language model may lack the parameter."""
    is_head = model.output.is_new and name == "output_layer.weight"
    return is_head or is_adapter_key(name)


def _deviation(name: str, shape: tuple[int, ...], model: ModelSection) -> float:
    if is_adapter_key(name):
        return first_deviation(name, shape[-1])
    into_residual = name.endswith(("linear_proj.weight", "out_proj.weight", "linear_fc2.weight"))
    # scaled so that the variance of the residual does not grow with the depth
    additions = (2 if model.layer_pattern is None else 1) * model.num_layers
    return model.init_std / math.sqrt(additions) if into_residual else model.init_std


def _transformation(name: str, model: ModelSection) -> Callable[[Tensor], Tensor] | None:
    """Returns the function from uniform numbers to initial values; None for parameters drawn like matrices."""
    for part in present(model):
        for ending, transformation in MODULES[type(part)].first_values.items():
            if name.endswith(ending):
                return transformation
    return None


def draw(
    target: Tensor, name: str, shape: tuple[int, ...], offset: tuple[int, ...], deviation: float, num_threads: int
) -> None:
    """Fills a part of a tensor block by block, each from its own generator, so that the number of threads changes no
    bit.

    A block is drawn in float32, rounded once, and sliced, so the whole tensor never exists in float32. Generators
    cannot skip numbers, so whole blocks are drawn, including columns of other ranks. `name` seeds the generators.
    """
    first, end = offset[0], offset[0] + target.shape[0]
    columns = [slice(start, start + size) for start, size in zip(offset[1:], target.shape[1:])]

    @torch.no_grad()  # applies to this thread only
    def fill(block: int) -> None:
        digest = hashlib.sha256(f"{name}:{block}".encode()).digest()
        # a CPU generator even for GPUs, so that both get the same numbers
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(_ROWS_PER_BLOCK, *shape[1:]).normal_(0.0, deviation, generator=generator)
        start = block * _ROWS_PER_BLOCK
        low, high = max(first, start), min(end, start + _ROWS_PER_BLOCK)
        target[low - first : high - first] = values[(slice(low - start, high - start), *columns)]

    blocks = range(first // _ROWS_PER_BLOCK, (end - 1) // _ROWS_PER_BLOCK + 1)
    mapped(fill, blocks, min(num_threads, len(blocks)))
