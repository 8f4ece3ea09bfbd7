"""The identity of the frozen model that adapters belong to.

Checkpoints of adapters do not hold it. They name its origin and a fingerprint of its bits, which is the same under
every layout; a run that resumes from them loads the model again and compares.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of, shown
from mtrain.checkpoint.store.manifest import BaseInfo, Manifest
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.layers.adapters.adapter import adapters_of, is_adapter_key
from mtrain.core.layers.adapters.linear import LinearAdapter
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import (
    ShardedParameter,
    frozen_parameters,
    is_written_here,
    sharded_parameters,
    shards,
)
from mtrain.core.ranks.groups import Groups


def settle_base(model: RankModel) -> None:
    """Records the base, once the frozen weights are those of the run and before its adapters are loaded, and does what
    `settle_magnitudes` does. One all-reduce over the world."""
    chunks = model.chunks
    found = weights_fingerprint(chunks, model.groups, model.config.model.vocab_size)
    for chunk in chunks:
        unwrap(chunk).base_fingerprint = found
    settle_magnitudes(model)


def settle_magnitudes(model: RankModel) -> None:
    """Sets magnitudes (DoRA) to the norms of their rows; one all-reduce over TP for each of a row-parallel
    projection."""
    norms: dict[Tensor, Tensor] = {}
    for adapter in adapters_of(model.chunks):
        if isinstance(adapter, LinearAdapter):
            norms |= adapter.reset_magnitudes()
    model.optimizer.state.set_main_weights(norms)


def base_of(model: RankModel) -> BaseInfo | None:
    """Returns what a manifest says of the frozen model; None where the run trains all of it. Collective, unless
    `settle_base` has run."""
    config = model.config
    if config.adapter is None:
        return None
    known = unwrap(model.chunks[0]).base_fingerprint
    fingerprint = weights_fingerprint(model.chunks, model.groups, config.model.vocab_size) if known is None else known
    origin = config.model.hf or config.checkpoint.initialize_from or "drawn from train.seed"
    return BaseInfo(origin=origin, fingerprint=fingerprint)


def check_base(manifest: Manifest, own: BaseInfo | None, path: object) -> None:
    """Checks that a checkpoint of adapters resumes on the very model that they were trained on, and others on none."""
    saved = manifest.base
    if saved is None and own is not None:
        raise DataError(
            f"{path} holds a whole model, but the run has adapters; start from it in another run.dir with "
            f"checkpoint.initialize_from={path}"
        )
    if saved is not None and own is None:
        raise refused_as_model(saved, path)
    if saved is not None and own is not None and saved.fingerprint != own.fingerprint:
        raise DataError(
            f"the frozen model is not the one that the adapters of {path} were trained on (fingerprint "
            f"{own.fingerprint} of {own.origin}, not {saved.fingerprint} of {saved.origin}); restore it, or name the "
            "original one by model.hf or checkpoint.initialize_from"
        )


def refused_as_model(base: BaseInfo, path: object) -> DataError:
    """Returns the error for adapters where a whole model is needed."""
    return DataError(
        f"{path} holds only adapters, of a frozen model ({base.origin}), but a whole model is needed; merge them with "
        f"mtrain convert export --checkpoint {path} --out DIR, and take DIR"
    )


def weights_fingerprint(chunks: Sequence[nn.Module], groups: Groups, vocab_size: int) -> str:
    """Returns the fingerprint of all frozen tensors, without vocabulary padding; refuses numbers that are not finite.
    One all-reduce over the world."""
    return _fingerprint(frozen_parameters(_models(chunks), groups), groups, vocab_size, "the frozen model")


def model_fingerprint(chunks: Sequence[nn.Module], groups: Groups, vocab_size: int, with_adapters: bool) -> str:
    """Returns the fingerprint of all tensors of a model, with adapters or without; see `weights_fingerprint`."""
    places = sharded_parameters(_models(chunks), groups, lambda key: with_adapters or not is_adapter_key(key))
    return _fingerprint(places, groups, vocab_size, "the model")


def _models(chunks: Sequence[nn.Module]) -> list[Any]:
    return [unwrap(chunk) for chunk in chunks]


def _fingerprint(places: Sequence[ShardedParameter], groups: Groups, vocab_size: int, name_of_model: str) -> str:
    sums = torch.zeros(2, dtype=torch.int64, device=groups.device)
    # each element on one rank of the world
    written = (place for place in places if is_written_here(place))
    for part in (part for place in written for part in shards(place, place.key, place.data)):
        axes = part.prepend_axis_num  # leading axes, which number layers and experts
        shape, offset, values = part.global_shape[axes:], part.global_offset[axes:], part.data
        if part.allow_shape_mismatch:  # a table: tp decides how many rows are padding
            shape, values = (vocab_size, *shape[1:]), values[: max(0, vocab_size - offset[0])]
        if values.numel():
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            sums[0] += hash_of(name, values, TensorSlice(tuple(offset), tuple(values.shape)), shape)
            sums[1] += (~values.isfinite()).sum()
    dist.all_reduce(sums)
    total, num_broken = (int(each) for each in sums.tolist())
    if num_broken:
        error = DataError(f"{num_broken} numbers of {name_of_model} are nan or inf; restore it, or name another one")
        error.on_every_rank = True  # after the sum all ranks know the same
        raise error
    return shown(total)
