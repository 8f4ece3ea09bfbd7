"""Conversion between whole tensors and shards of any layout."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from mtrain.config import Config
from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard
from mtrain.verify.core.reach import scaled
from mtrain.verify.reference.model.images import TOWER

Arrays = dict[str, NDArray[Any]]
"""Global tensors by name; vocabulary tables include padding rows."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
TABLES = (EMBEDDING, OUTPUT, "embedding.word_embeddings_adapter.embedding_lora_a", "output_layer_adapter.output_lora_b")
"""Tensors with a row per token; padding rows are 0."""
_DEVIATION = 0.1
"""Standard deviation of matrices of up to 64 columns, of norms' gains around 1 and of biases around 0. It shrinks with
the square root of wider matrices' columns: sharper attention of an untrained model would amplify rounding."""
_COLUMNS = 64


class Whole(NamedTuple):
    """Tensors assembled from all ranks."""

    tensors: Arrays
    spread: dict[str, float]
    """Largest difference between ranks that hold the same element; replicas are equal in a sound run."""


def drawn(name: str, shape: Sequence[int], config: Config, model: str = "trained") -> Tensor:
    """Draws the values of a parameter from its global name: every element, so that no gradient is 0 by accident.

    Tied tables share the embedding's values; rows of the padded vocabulary are 0. Each `model` of a run has its own
    values.
    """
    source = EMBEDDING if name == OUTPUT and config.model.tied_embeddings else name
    digest = hashlib.sha256(f"{config.train.seed}:{model}:{source}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    real = [min(shape[0], config.model.vocab_size), *shape[1:]] if source in TABLES else list(shape)
    narrowing = math.sqrt(min(1.0, _COLUMNS / shape[-1])) if len(shape) > 1 else 1.0
    values = torch.randn(real, generator=generator) * (_DEVIATION * narrowing)
    if len(shape) == 1 and name.endswith(("weight", "magnitude")) and not _is_zero_centered(name, config.model):
        values += 1.0
    values = scaled(name, values, config.model)
    whole = torch.zeros(*shape)
    whole[: real[0]] = values
    return whole


def _is_zero_centered(name: str, model: ModelSection) -> bool:
    """Says whether the parameter is the weight of a norm whose gain is 1 + weight."""
    if name.startswith(TOWER):
        return name.endswith("mm_soft_emb_norm.weight")
    return model.zero_centered_norm and not name.endswith(("out_norm.weight", "magnitude"))


@torch.no_grad()
def set_weights(
    modules: Iterable[nn.Module], groups: Groups, whole_of: Callable[[str, Sequence[int]], Tensor | None]
) -> None:
    """Copies this rank's shards from whole tensors; call it before the optimizer copies the weights.

    `whole_of` takes global name and shape; None leaves the shard unchanged.
    """
    for module in modules:
        for part in sharded_tensors(unwrap(module), groups):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            whole = whole_of(name, part.global_shape[axes:])
            region = zip(part.global_offset[axes:], part.data.shape, strict=True)
            if whole is not None:
                part.data.copy_(whole[tuple(slice(start, start + size) for start, size in region)])


def gathered(shards: Sequence[Shard]) -> Whole | None:
    """Gathers whole tensors on rank 0, None elsewhere, in one gather of objects over the world."""
    # numpy has no bfloat16, which float32 holds exactly
    widened = (shard.data.float() if shard.data.dtype == torch.bfloat16 else shard.data for shard in shards)
    local = [shard._replace(data=values.numpy()) for shard, values in zip(shards, widened, strict=True)]  # type: ignore[arg-type]
    by_rank: list[Any] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(local, by_rank)
    return None if by_rank is None else assembled(shard for rank in by_rank for shard in rank)


def assembled(shards: Iterable[Any]) -> Whole:
    """Assembles shards with numpy values; the first rank that holds an element sets its value."""
    tensors: Arrays = {}
    filled: dict[str, NDArray[np.bool_]] = {}
    spread: dict[str, float] = {}
    for shard in shards:
        if shard.key not in tensors:
            tensors[shard.key] = np.full(shard.global_shape, np.nan, shard.data.dtype)
            filled[shard.key] = np.zeros(shard.global_shape, np.bool_)
        region = tuple(slice(first, first + size) for first, size in zip(*shard.at, strict=True))
        whole, known = tensors[shard.key][region], filled[shard.key][region]
        difference = np.abs(whole - shard.data, where=known, out=np.zeros(whole.shape))
        spread[shard.key] = max(spread.get(shard.key, 0.0), float(difference.max(initial=0.0)))
        whole[~known] = shard.data[~known]
        known[...] = True
    return Whole(tensors, spread)
