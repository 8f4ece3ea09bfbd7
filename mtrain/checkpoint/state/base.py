"""Identifies the frozen model that adapters belong to.

Checkpoints of adapters do not contain it. They name its origin and a fingerprint of its bits, which is the same under
every layout; a run that resumes from them loads the model again and compares the fingerprint.
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
    held_values,
    is_written_here,
    sharded_parameters,
    shards,
)
from mtrain.core.ranks.groups import Groups


def settle_base(model: RankModel) -> None:
    """Records the base's fingerprint, after its weights are loaded and before the adapters are, and calls
    `settle_magnitudes`. One all-reduce over the world."""
    chunks = model.chunks
    fingerprint = weights_fingerprint(chunks, model.groups, model.config.model.vocab_size)
    for chunk in chunks:
        unwrap(chunk).base_fingerprint = fingerprint
    settle_magnitudes(model)


def settle_magnitudes(model: RankModel) -> None:
    """Sets DoRA's magnitudes to the norms of their rows; one all-reduce over TP for each row-parallel projection."""
    norms: dict[Tensor, Tensor] = {}
    for adapter in adapters_of(model.chunks):
        if isinstance(adapter, LinearAdapter):
            norms |= adapter.reset_magnitudes()
    model.optimizer.state.set_main_weights(norms)


def base_of(model: RankModel) -> BaseInfo | None:
    """Returns a manifest's entry for the frozen model; None if the run trains the whole model. Collective, unless
    `settle_base` has run."""
    config = model.config
    if config.adapter is None:
        return None
    known = unwrap(model.chunks[0]).base_fingerprint
    fingerprint = weights_fingerprint(model.chunks, model.groups, config.model.vocab_size) if known is None else known
    origin = config.model.hf or config.checkpoint.initialize_from or "drawn from train.seed"
    return BaseInfo(origin=origin, fingerprint=fingerprint)


def check_base(manifest: Manifest, current: BaseInfo | None, path: object) -> None:
    """Checks that adapters resume on the frozen model that they were trained on, and a whole model on none."""
    saved = manifest.base
    if saved is None and current is not None:
        raise DataError(
            f"{path} contains a whole model, but the run has adapters; start from it in another run.dir with "
            f"checkpoint.initialize_from={path}"
        )
    if saved is not None and current is None:
        raise refused_as_model(saved, path)
    if saved is not None and current is not None and saved.fingerprint != current.fingerprint:
        raise DataError(
            f"the frozen model is not the one that the adapters of {path} were trained on (fingerprint "
            f"{current.fingerprint} of {current.origin}, not {saved.fingerprint} of {saved.origin}); restore it, or "
            "name the original model with model.hf or checkpoint.initialize_from"
        )


def refused_as_model(base: BaseInfo, path: object) -> DataError:
    """Returns the error about adapters that were given instead of a whole model."""
    return DataError(
        f"{path} contains only adapters of a frozen model ({base.origin}), but a whole model is needed; merge them "
        f"with mtrain convert export --checkpoint {path} --out DIR, and use DIR"
    )


def weights_fingerprint(chunks: Sequence[nn.Module], groups: Groups, vocab_size: int) -> str:
    """Returns the fingerprint of all frozen tensors, without vocabulary padding; refuses nan and inf. One all-reduce
    over the world."""
    return _fingerprint(frozen_parameters(_models(chunks), groups), groups, vocab_size, "the frozen model")


def model_fingerprint(chunks: Sequence[nn.Module], groups: Groups, vocab_size: int, with_adapters: bool) -> str:
    """Returns the fingerprint of all of a model's tensors, with or without adapters; see `weights_fingerprint`."""
    parameters = sharded_parameters(_models(chunks), groups, lambda key: with_adapters or not is_adapter_key(key))
    return _fingerprint(parameters, groups, vocab_size, "the model")


def _models(chunks: Sequence[nn.Module]) -> list[Any]:
    return [unwrap(chunk) for chunk in chunks]


def _fingerprint(parameters: Sequence[ShardedParameter], groups: Groups, vocab_size: int, name_of_model: str) -> str:
    sums = torch.zeros(2, dtype=torch.int64, device=groups.device)
    # exactly one rank of the world counts each element
    written = (parameter for parameter in parameters if is_written_here(parameter))
    values_of = ((parameter, held_values(parameter.data).to(parameter.data.dtype)) for parameter in written)
    for part in (part for parameter, values in values_of for part in shards(parameter, parameter.key, values)):
        axes = part.prepend_axis_num  # leading axes of layers and experts
        shape, offset, values = part.global_shape[axes:], part.global_offset[axes:], part.data
        if part.allow_shape_mismatch:  # a vocabulary table, whose number of padding rows depends on tp
            shape, values = (vocab_size, *shape[1:]), values[: max(0, vocab_size - offset[0])]
        if values.numel():
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            sums[0] += hash_of(name, values, TensorSlice(tuple(offset), tuple(values.shape)), shape)
            sums[1] += (~values.isfinite()).sum()
    dist.all_reduce(sums)
    total, num_broken = (int(number) for number in sums.tolist())
    if num_broken:
        error = DataError(f"{num_broken} numbers of {name_of_model} are nan or inf; restore it, or name another model")
        error.on_every_rank = True  # all ranks have the same sum
        raise error
    return shown(total)
