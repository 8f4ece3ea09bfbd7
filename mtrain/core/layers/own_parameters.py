"""Modules of our own in megatron-core's tree: how parameters are built and marked, and their places in a checkpoint."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

ShardedOffsets = tuple[tuple[int, int, int], ...]
"""(axis, index, count) of the axes before those of the parameters, such as layers; megatron-core's form."""


def device_of(config: TransformerConfig) -> str | int:
    """Returns the device on which parameters are built."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def divided_parameter(config: TransformerConfig, values: Tensor, axis: int = 0) -> nn.Parameter:
    """Returns this rank's part of a parameter that is divided over TP: the gradient norm counts those of every rank."""
    parameter = nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config)))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    return parameter


def replicated_parameter(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns a parameter that is whole on every rank of TP; the gradient norm counts the copy of rank 0 alone."""
    parameter: Any = nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config)))
    # under sp each rank of TP sees its own tokens: this mark makes finalize_model_grads sum the gradients
    parameter.sequence_parallel = config.sequence_parallel
    return cast(nn.Parameter, parameter)


def expert_parameter(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns a parameter of this rank's experts."""
    return marked(nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config))))


def marked(parameter: Any) -> nn.Parameter:
    """Marks a parameter of experts, as megatron-core's optimizer and gradient norm read it."""
    parameter.allreduce = False  # its replicas are those of the expert, not of the dense layers
    parameter.tensor_model_parallel = True  # no other rank holds the same part: counts in the norm everywhere
    parameter.partition_dim, parameter.partition_stride = 0, 1
    return cast(nn.Parameter, parameter)


class DividedModule(MegatronModule):
    """A module whose own parameters may be divided over TP."""

    divided_axes: Mapping[str, int] = MappingProxyType({})
    """Name of a parameter -> axis that is divided over TP; the others are the same on all ranks."""

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the places of all parameters, those of submodules included."""
        assert metadata is not None, "megatron-core passes it to every layer"
        places: dict[str, ShardedTensor] = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            self.divided_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | places


def input_projection(
    config: TransformerConfig, columns: int, rows: int, tp: dist.ProcessGroup, kind: Any = ColumnParallelLinear
) -> Any:
    """Builds a projection without bias whose `rows` are divided over TP, by a column-parallel class."""
    return kind(
        columns,
        rows,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp,
    )


def output_projection(
    config: TransformerConfig, width: int, tp: dist.ProcessGroup, kind: Any = RowParallelLinear
) -> Any:
    """Builds the projection of heads, `width` channels that are divided over TP, to a layer's output."""
    return kind(
        width,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_group=tp,
    )


class OwnAttention(DividedModule):
    """Replaces megatron-core's SelfAttention in a layer spec."""

    core_attention: nn.Module

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__(config, tp)
        # megatron-core recomputes the core only inside its own SelfAttention
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def attended(self, *arguments: Any) -> Tensor:
        """Calls the core, which is recomputed in backward if configured."""
        if self.recomputes_core and self.training:
            return checkpoint(self.core_attention, False, *arguments)  # False: saved tensors are not spread over TP
        return self.core_attention(*arguments)
