"""Weights divided over the ranks of DP x CP, which torch's fully_shard gathers layer by layer.

Each rank holds some rows of every parameter: of trained ones in float32, as main weights, of frozen ones in the dtype
that computes. Before a layer computes, forward or backward, its rows are gathered in the run's precision; afterwards
they are freed. Gradients are summed over the ranks in float32, and each rank keeps those of its rows.

The output layer, or a tied embedding, stays gathered from the beginning of a forward pass to the end of its backward
pass: the loss multiplies by it after the model's forward pass has ended, and fully_shard would then miss its gradient.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer import TransformerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from mtrain.base.errors import ConfigError
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.moe.experts import Experts, Stack
from mtrain.core.layers.mtp import Depth
from mtrain.core.layers.output_layer import OutputLayer, ScoreHead
from mtrain.core.layers.sharded_parameters import HeldRows, divide, rows_of_rank, stand_in_of
from mtrain.core.layers.vision import VisionTower
from mtrain.core.ranks.groups import Groups

_TABLES = (VocabParallelEmbedding, OutputLayer, ScoreHead)


class Divided(NamedTuple):
    """A parameter in its three forms."""

    name: str
    parameter: Any
    """DTensor that fully_shard gathers from, and whose gradient it sums."""
    stand_in: nn.Parameter
    """Parameter of the whole shape, without memory; see `divide`."""
    main: Any
    """Rows that this rank holds: an ordinary parameter in the memory of the DTensor."""


@contextlib.contextmanager
def matrices_without_memory() -> Iterator[None]:
    """Inside the block, matrices of new layers have no memory until `divide_weights` divides them, so that a rank never
    holds a whole stage. Tables have memory, since they are gathered for whole passes anyway."""

    def without_memory(holder: nn.Module, name: str, built: nn.Module) -> None:
        # while they are built, experts choose a product by the device of their stacks
        for module in () if isinstance(built, Stack) else built.modules():
            matrix = module._parameters.get("weight")
            if matrix is not None and matrix.dim() > 1 and not isinstance(module, _TABLES):
                module._parameters["weight"] = stand_in_of(matrix)

    handle = register_module_module_registration_hook(without_memory)
    try:
        yield
    finally:
        handle.remove()


def divide_weights(
    chunk: LanguageModel, groups: Groups, computes_in: torch.dtype, only_frozen: bool = False
) -> list[Divided]:
    """Divides the parameters of a chunk, or only the frozen ones. Matrices without memory have undefined values until
    they are initialised or loaded.

    Raises:
        ConfigError: A parameter computes in another precision than `computes_in`.
    """
    if only_frozen:
        _give_memory(chunk, groups.device, only_trained=True)
    whole = {each for each in chunk.parameters() if only_frozen and each.requires_grad}
    stand_ins = {name: stand_in_of(each) for name, each in chunk.named_parameters() if each not in whole}
    widest = torch.promote_types(computes_in, torch.float32)
    policy = MixedPrecisionPolicy(
        param_dtype=None if computes_in == widest else computes_in,
        reduce_dtype=widest,
        cast_forward_inputs=False,  # angles stay in float32
    )
    for name, each in stand_ins.items():
        # in a float32 run, layers themselves widen frozen matrices (adapter.base_dtype)
        if each.dtype != computes_in and (each.requires_grad or policy.param_dtype is not None):
            raise ConfigError(
                f"{name} does not compute in the precision of the run, which layout.shard=weights needs; set "
                "layout.shard=optimizer"
            )
    kind = groups.device.type
    of_experts, of_others = (DeviceMesh.from_group(each, kind) for each in (groups.collection.expt_dp, groups.dp_cp))
    for module in _units(chunk):
        mesh = of_experts if isinstance(module, Experts) else of_others
        _give_memory(module, groups.device)
        _widen(module, whole, widest)
        # the root unit stays gathered, since it has the table that the loss multiplies by
        stays = module is chunk
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not stays, ignored_params=whole)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):
            # Neither is recursive. Sums, as gradients are divided once, by the denominator (core/engine/finalize.py).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    divided = ((name, each) for name, each in chunk.named_parameters() if name in stand_ins)
    return [_with_rows(name, each, stand_ins[name], groups) for name, each in divided]


def free_gathered(chunks: Iterable[nn.Module]) -> None:
    """Frees weights that are still gathered, so that no later pass uses old values.

    Also clears fully_shard's list of forward passes without a backward pass. Does nothing to chunks that are not
    divided.
    """
    for chunk in chunks:
        state = chunk._get_fsdp_state() if isinstance(chunk, FSDPModule) else None
        if state is not None and state._is_root:  # set by the first forward pass, before which nothing is gathered
            state._root_post_backward_final_callback()  # torch calls it at the end of a backward pass


def _give_memory(unit: nn.Module, device: torch.device, only_trained: bool = False) -> None:
    for module in unit.modules():
        matrix = module._parameters.get("weight")
        if matrix is not None and matrix.is_meta and (matrix.requires_grad or not only_trained):
            values = nn.Parameter(torch.empty_like(matrix, device=device), matrix.requires_grad)
            vars(values).update(vars(matrix))
            module._parameters["weight"] = values


def _widen(unit: nn.Module, excluded: set[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in unit.parameters():
        if parameter.requires_grad and parameter not in excluded and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _with_rows(name: str, parameter: Any, stand_in: Any, groups: Groups) -> Divided:
    assert isinstance(parameter, DTensor), f"{name} is not divided"
    main: Any = nn.Parameter(parameter.to_local(), parameter.requires_grad)
    vars(main).update(vars(stand_in))  # marks of the gradient norm, and of sums over TP
    replicas = groups.replicas_of(stand_in)
    rows = rows_of_rank(parameter, replicas)
    first = min(replicas.rank() * rows, parameter.shape[0])
    assert len(main) == min(rows, parameter.shape[0] - first), f"{name} is divided otherwise than by torch.chunk"
    divide(parameter, stand_in, HeldRows(main, first * math.prod(parameter.shape[1:]), replicas))
    return Divided(name, parameter, stand_in, main)


def _units(chunk: LanguageModel) -> Iterator[nn.Module]:
    """Yields the modules whose parameters are gathered together, inner ones first; each is used only inside its own
    forward pass."""
    for module in reversed(list(chunk.modules())):
        if isinstance(module, TransformerLayer | Depth | Experts | VisionTower):
            yield module
    if not chunk.share_embeddings_and_output_weights and hasattr(chunk, "embedding"):
        yield chunk.embedding
    # its own unit, although it has only a norm: the backward pass begins at its output, a tensor, even if recomputed
    # layers run backward passes of their own, which must not count as the end of the step
    yield chunk.decoder
    yield chunk
