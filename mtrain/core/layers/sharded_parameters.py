"""Global names and slices, independent of the layout, of this rank's parameters and of tensors of their shapes."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mtrain.base.tensor_slice import TensorSlice, slices_of_run
from mtrain.core.layers.adapters.adapter import has_adapters, is_adapter_key
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard

ShardedParameter: TypeAlias = ShardedTensor | ShardedTensorFactory
"""Global name, shape and offset of a parameter; `data` is the parameter itself, or its `stand_in`."""


class HeldRows(NamedTuple):
    """Rows that this rank holds of a parameter divided over DP x CP."""

    main: Tensor
    """[rows, ...], which the optimizer updates."""
    start: int
    """Index of the first element in the flattened parameter."""
    group: dist.ProcessGroup
    """Ranks that divide the parameter."""

    @property
    def end(self) -> int:
        return self.start + self.main.numel()


def stand_in_of(parameter: nn.Parameter) -> Any:
    """Returns a parameter of the same shape, dtype and marks, without memory.

    It replaces a sharded parameter in `sharded_parameters`, and identifies it elsewhere.
    """
    stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


def divide(parameter: Any, stand_in: Any, held: HeldRows) -> None:
    """Records the rows that this rank holds of `parameter`, a DTensor, on it and on its stand-in."""
    parameter.stand_in, stand_in.held = stand_in, held


def held_rows(parameter: Any) -> HeldRows | None:
    """Returns the rows that this rank holds of a divided parameter or of its stand-in; None for other parameters."""
    return getattr(getattr(parameter, "stand_in", parameter), "held", None)


def held_values(parameter: Tensor) -> Tensor:
    """Returns the rows that this rank holds of a parameter, [rows, ...], as writable memory; the whole parameter if it
    is not divided."""
    held = held_rows(parameter)
    return parameter if held is None else held.main


@torch.no_grad()
def gathered_rows(parameter: Tensor, values: Tensor) -> Tensor:
    """Gathers the rows of a divided parameter, or of its gradient, to its whole shape: one all-gather over the ranks
    that divide it. Returns `values` for other parameters.

    DTensor's `full_tensor` caches meshes, so it might use the process groups of an earlier engine of this process.

    Args:
        values: Rows that this rank holds, [rows, ...].
    """
    held = held_rows(parameter)
    if held is None:
        return values
    rows, size = rows_of_rank(parameter, held.group), held.group.size()
    padded = torch.cat((values, values.new_zeros(rows - len(values), *values.shape[1:])))
    whole = values.new_empty(rows * size, *values.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=held.group)
    return whole[: parameter.shape[0]]


def rows_of_rank(parameter: Tensor, group: dist.ProcessGroup) -> int:
    """Returns the number of rows of a rank, as in torch.chunk; the last ranks may have fewer."""
    return -(-parameter.shape[0] // group.size())


def checkpoint_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the parameters that a checkpoint stores: all of them, or only trained ones in a model with adapters."""
    models = list(modules)
    # by an attribute of the model, since this stage may hold no adapter
    adapts = any(has_adapters(model) for model in models)
    return sharded_parameters(models, groups, lambda key: not adapts or _learns(models, key))


def base_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the parameters of the model without adapters."""
    return sharded_parameters(modules, groups, lambda key: not is_adapter_key(key))


def frozen_parameters(modules: Iterable[MegatronModule], groups: Groups) -> list[ShardedParameter]:
    """Returns the parameters that adapters leave frozen; all of them in a model without adapters."""
    models = list(modules)
    return sharded_parameters(models, groups, lambda key: not _learns(models, key))


def _learns(models: Iterable[MegatronModule], key: str) -> bool:
    if is_adapter_key(key):
        return True
    # the plain model of a teacher or a test has no such attribute
    rules = [getattr(model, "learns_whole", None) for model in models]
    return any(learns_whole is not None and learns_whole(key) for learns_whole in rules)


def sharded_parameters(
    modules: Iterable[MegatronModule], groups: Groups, selects: Callable[[str], bool] = lambda key: True
) -> list[ShardedParameter]:
    """Returns all parameters, and buffers in the model's state, whose keys the function selects.

    Copies on other ranks are replicas: over TP, over stages (tied embeddings) and over DP x CP, or, for experts, over
    the ranks with the same experts. Each of n ranks has the main replica of every n-th parameter, so that all share the
    writing.
    """
    # without the metadata megatron-core would use its global state
    metadata, models = {"dp_cp_group": groups.dp_cp}, list(modules)
    with _stand_ins(models):
        states = [value for module in models for value in nested_values(module.sharded_state_dict(metadata=metadata))]
    # leaves out TransformerEngine's pickled _extra_state, which is empty without fp8
    parameters = [
        state for state in states if isinstance(state, ShardedTensor | ShardedTensorFactory) and selects(state.key)
    ]
    return [
        # (over stages, over TP, over replicas)
        replace(parameter, replica_id=(*parameter.replica_id[:2], _turn(groups.replicas_of(parameter.data), number)))
        for number, parameter in enumerate(parameters)
    ]


@contextlib.contextmanager
def _stand_ins(models: Sequence[nn.Module]) -> Iterator[None]:
    """Replaces divided parameters by their stand-ins inside the block."""
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()  # gathered parameters would be taken for undivided ones
    divided = [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if hasattr(parameter, "stand_in")
    ]
    try:
        for module, name, parameter in divided:
            module._parameters[name] = parameter.stand_in  # type: ignore[union-attr]
        yield
    finally:
        for module, name, parameter in divided:
            module._parameters[name] = parameter


def _turn(replicas: dist.ProcessGroup, number: int) -> int:
    # round robin, so that ranks write about equally many bytes
    return int((replicas.rank() - number) % replicas.size())


def is_written_here(parameter: ShardedParameter) -> bool:
    """Says whether this rank has the main replica of what it holds."""
    # ranks of DP x CP that shard a parameter hold no replicas of it
    if held_rows(parameter.data) is not None:
        return has_own_shard(parameter)
    return bool(is_main_replica(parameter.replica_id))


def has_own_shard(parameter: ShardedParameter) -> bool:
    """Says whether this rank's copy is the main one over TP and stages; DP x CP may still divide it."""
    return not any(parameter.replica_id[:2])


def optimizer_key(state: str, key: str) -> str:
    """Returns megatron-core's name of a state of the parameter called `key`: `param`, `exp_avg` or `exp_avg_sq`."""
    return f"optimizer.state.{state}.{key}"


def shards(parameter: ShardedParameter, key: str, values: Tensor) -> Iterator[ShardedTensor]:
    """Yields the shards of `values`, a tensor with the shape of a parameter such as its moments, as views; fused
    parameters are split into their parts. For a sharded parameter, `values` may be the rows that this rank holds."""
    held = held_rows(parameter.data)
    if held is not None and values.shape != parameter.data.shape:
        yield from _shards_of_rows(parameter, key, values, held.start)
    elif isinstance(parameter, ShardedTensorFactory):
        # gate and up of linear_fc1 are two slices of the global tensor, with rows of other ranks in between
        yield from nested_values(replace(parameter, key=key, data=values).build())
    else:
        yield replace(parameter, key=key, data=values, dtype=values.dtype)


def _shards_of_rows(parameter: ShardedParameter, key: str, values: Tensor, start: int) -> Iterator[ShardedTensor]:
    for shard in shards(parameter, key, parameter.data):
        begin, axes = shard.data.storage_offset(), shard.prepend_axis_num  # counted in the parameter, as `start`
        low, high = max(start, begin), min(start + values.numel(), begin + shard.data.numel())
        if low < high:
            row = math.prod(shard.data.shape[1:])
            assert (low - begin) % row == (high - low) % row == 0, f"{shard.key} is not made of rows of its parameter"
            part = values.view(-1)[low - start : high - start].view(-1, *shard.data.shape[1:])
            offset = (*shard.global_offset[:axes], shard.global_offset[axes] + (low - begin) // row)
            yield replace(
                shard,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_offset=(*offset, *shard.global_offset[axes + 1 :]),
                axis_fragmentations=None,  # the ranks' numbers of rows differ
            )


def whole_of(parameter: ShardedParameter, key: str, values: Tensor) -> Iterator[Shard]:
    """Yields the shards of `values`, the parameter itself or a tensor of its shape, as views."""
    return run_of(parameter, key, values.view(-1), 0, values.numel())


def held_of(parameter: ShardedParameter) -> Iterator[Shard]:
    """Yields the shards of a parameter that this rank holds, as views; those of a sharded one are copies in the dtype
    that computes."""
    return _held_of(parameter, lambda main: main.to(parameter.data.dtype))


def updated_of(parameter: ShardedParameter) -> Iterator[Shard]:
    """Yields the shards of a parameter that this rank holds, as views that later updates change; those of a sharded one
    are its float32 main weights."""
    return _held_of(parameter, lambda main: main)


def _held_of(parameter: ShardedParameter, values_of: Callable[[Tensor], Tensor]) -> Iterator[Shard]:
    held = held_rows(parameter.data)
    if held is None:
        return whole_of(parameter, parameter.key, parameter.data)
    return run_of(parameter, parameter.key, values_of(held.main).view(-1), held.start, held.end)


def run_of(parameter: ShardedParameter, key: str, values: Tensor, start: int, end: int) -> Iterator[Shard]:
    """Yields the shards of elements [start, end) of this rank's flattened parameter, or of a tensor of its shape, as
    views of `values`, [end - start]."""
    for shard in shards(parameter, key, parameter.data):
        # slices_of_run counts elements in memory order, unlike a strided view
        assert shard.data.is_contiguous(), f"{shard.key} is not a run of elements of its parameter"
        first = shard.data.storage_offset() - parameter.data.storage_offset()
        # the part of this shard inside the run, in elements of the parameter
        low, high = max(start, first), min(end, first + shard.data.numel())
        axes = shard.prepend_axis_num
        for within, inner in slices_of_run(shard.local_shape, low - first, high - first) if low < high else ():
            # offset of the slice in the global tensor, after the stacked axes
            offset = [outer + local for outer, local in zip(shard.global_offset[axes:], inner.offset)]
            begin = first + within - start  # relative to `values`, which begin at `start`
            yield Shard(
                shard.key,
                tuple(shard.global_shape),
                TensorSlice((*shard.global_offset[:axes], *offset), (*[1] * axes, *inner.shape)),
                values[begin : begin + inner.num_elements].detach(),
                shard.allow_shape_mismatch,  # set by megatron-core for tables that are padded for tp
            )
