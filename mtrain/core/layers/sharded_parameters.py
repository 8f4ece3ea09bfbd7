"""Global names and slices of this rank's parameters, which do not depend on the layout, and of tensors of their
shape."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mtrain.base.tensor_slice import TensorSlice, slices_of_run
from mtrain.core.layers.adapters.adapter import has_adapters, is_adapter_key
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard

ShardedParameter: TypeAlias = ShardedTensor | ShardedTensorFactory
"""Global name, shape and offset of a parameter; `data` is the parameter itself."""


def checkpoint_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the places that a checkpoint stores: all, or in a model with adapters the trained ones."""
    models = list(modules)
    # asks the model, as this stage may hold no adapter
    adapts = any(has_adapters(model) for model in models)
    return sharded_parameters(models, groups, lambda key: not adapts or _learns(models, key))


def base_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the places of the model itself, without adapters."""
    return sharded_parameters(modules, groups, lambda key: not is_adapter_key(key))


def frozen_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the places that do not learn; all of them in a model without adapters."""
    models = list(modules)
    return sharded_parameters(models, groups, lambda key: not _learns(models, key))


def _learns(models: Iterable[MegatronModule], key: str) -> bool:
    if is_adapter_key(key):
        return True
    # a teacher's or a test's plain model has no such attribute
    rules = [getattr(model, "learns_whole", None) for model in models]
    return any(learns_whole is not None and learns_whole(key) for learns_whole in rules)


def sharded_parameters(
    modules: Iterable[MegatronModule], groups: Groups, is_wanted: Callable[[str], bool] = lambda key: True
) -> list[ShardedParameter]:
    """Returns the places of all parameters whose keys are wanted, and of the buffers that belong to the model's state.

    Copies on other ranks are replicas: over TP, over stages (tied embeddings), over DP x CP; those of experts over the
    ranks that hold the same ones. Each of these has the main replica of every n-th parameter, so that all share the
    writing.
    """
    # megatron-core would ask the global state
    metadata = {"dp_cp_group": groups.dp_cp}
    states = (value for module in modules for value in nested_values(module.sharded_state_dict(metadata=metadata)))
    # TransformerEngine's pickled _extra_state is empty without fp8 and left out
    places = [
        state for state in states if isinstance(state, ShardedTensor | ShardedTensorFactory) and is_wanted(state.key)
    ]
    return [
        # (over stages, over TP, over replicas)
        replace(place, replica_id=(*place.replica_id[:2], _turn(groups.replicas_of(place.data), number)))
        for number, place in enumerate(places)
    ]


def _turn(replicas: dist.ProcessGroup, number: int) -> int:
    # in turn, so that the ranks write about equally many bytes
    return int((replicas.rank() - number) % replicas.size())


def is_written_here(place: ShardedParameter) -> bool:
    """Says whether this rank has the main replica."""
    return bool(is_main_replica(place.replica_id))


def has_own_shard(place: ShardedParameter) -> bool:
    """Says whether this place has no replica over TP and stages; over DP x CP it may be cut."""
    return not any(place.replica_id[:2])


def optimizer_key(state: str, key: str) -> str:
    """Returns megatron-core's name of a state of the parameter called `key`: `param`, `exp_avg` or `exp_avg_sq`."""
    return f"optimizer.state.{state}.{key}"


def shards(place: ShardedParameter, key: str, values: Tensor) -> Iterator[ShardedTensor]:
    """Yields the shards of a tensor of a parameter's shape, such as its moments, as views; fused parameters come as
    their parts."""
    if isinstance(place, ShardedTensorFactory):
        # gate and up of linear_fc1 are two slices of the global tensor, with other ranks' rows between them
        yield from nested_values(replace(place, key=key, data=values).build())
    else:
        yield replace(place, key=key, data=values, dtype=values.dtype)


def whole_of(place: ShardedParameter, key: str, values: Tensor) -> Iterator[Shard]:
    """Yields the shards of a parameter, or of a tensor of its shape in its place; views of `values`."""
    return run_of(place, key, values.view(-1), 0, values.numel())


def run_of(place: ShardedParameter, key: str, values: Tensor, start: int, end: int) -> Iterator[Shard]:
    """Yields the shards of elements [start, end) of this rank's flattened parameter, or of a tensor in its place: views
    of `values`, [end - start]."""
    for shard in shards(place, key, place.data):
        # slices_of_run counts elements in memory order, which a strided view does not have
        assert shard.data.is_contiguous(), f"{shard.key} is not a run of elements of its parameter"
        first = shard.data.storage_offset() - place.data.storage_offset()
        # the part of this shard that lies in the run, counted in the parameter
        low, high = max(start, first), min(end, first + shard.data.numel())
        axes = shard.prepend_axis_num
        for within, inner in slices_of_run(shard.local_shape, low - first, high - first) if low < high else ():
            # place of the slice in the global tensor, after the stacked axes
            offset = [whole + more for whole, more in zip(shard.global_offset[axes:], inner.offset)]
            begin = first + within - start  # counted in `values`, which begin at `start`
            yield Shard(
                shard.key,
                tuple(shard.global_shape),
                TensorSlice((*shard.global_offset[:axes], *offset), (*[1] * axes, *inner.shape)),
                values[begin : begin + inner.num_elements].detach(),
                shard.allow_shape_mismatch,  # megatron-core's mark of tables that are padded for tp
            )
