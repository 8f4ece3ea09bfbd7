"""A frozen base model stored in bfloat16 in a float32 run.

Matrices of projections and tables are stored in bfloat16 and converted when a product uses them; norms, biases, routers
and sinks stay float32. So the results are exactly those of a float32 base with the same rounded values.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mtrain.core.layers.attention.mla import ReplicatedLinear
from mtrain.core.layers.moe.experts import Stack
from mtrain.core.layers.products import widened_linear


@contextlib.contextmanager
def built_narrow(translated: TransformerConfig) -> Iterator[None]:
    """Builds modules inside the block with bfloat16 parameters, since the base may not fit into memory in float32."""
    before = translated.params_dtype
    translated.params_dtype = torch.bfloat16
    try:
        yield
    finally:
        translated.params_dtype = before


def widen_all_but_matrices(model: nn.Module, dtype: torch.dtype, learned: Iterable[nn.Module] = ()) -> None:
    """Converts all parameters except frozen matrices to the dtype of the run, and makes each product convert its
    matrix.

    Args:
        model: Stage built inside `built_narrow`, still without adapters.
        learned: Fully trained modules, whose matrices are converted as well.
    """
    whole = {inner for module in learned for inner in module.modules()}
    for module in model.modules():
        is_matrix = False
        match module:
            case _ if module in whole:
                pass
            case ColumnParallelLinear() | RowParallelLinear():
                linear: Any = module
                linear._forward_impl = _frozen_linear
                is_matrix = True
            case VocabParallelEmbedding():
                # prepended to other hooks, which compute in the dtype of the run
                module.register_forward_hook(_widened_to(dtype), prepend=True)
                is_matrix = True
            case Stack() | ReplicatedLinear():
                is_matrix = True
        for name, parameter in module.named_parameters(recurse=False):
            if not (is_matrix and name == "weight"):
                parameter.data = parameter.data.to(dtype)


def _widened_to(dtype: torch.dtype) -> Callable[[nn.Module, object, Tensor], Tensor]:
    # after the sum over TP, which is exact, since only one rank has nonzero numbers
    return lambda table, inputs, output: output.to(dtype)


def _frozen_linear(
    input: Tensor,  # megatron-core passes it by this name
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **_: object,
) -> Tensor:
    """Replaces megatron-core's `linear_with_frozen_weight`, which needs one precision; makes the same collectives."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    output = widened_linear(input, weight)
    return output if bias is None else output + bias
