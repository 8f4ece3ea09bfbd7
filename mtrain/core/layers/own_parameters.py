"""Our modules inside megatron-core's models: how parameters are built, marked, and described for checkpoints."""

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
"""(axis, index, count) of stacked axes, such as layers, in front of those of a parameter; megatron-core's form."""


def device_of(config: TransformerConfig) -> str | int:
    """Returns the device on which parameters are built."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def divided_parameter(config: TransformerConfig, values: Tensor, axis: int = 0) -> nn.Parameter:
    """Returns this rank's shard of a parameter divided over TP; the gradient norm counts the shards of all ranks."""
    parameter = nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config)))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
    return parameter


def replicated_parameter(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns a parameter replicated over TP; the gradient norm counts only the copy of tensor-parallel rank 0."""
    parameter: Any = nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config)))
    # under sp each tensor-parallel rank sees its own tokens, so finalize_model_grads must sum the gradients
    parameter.sequence_parallel = config.sequence_parallel
    return cast(nn.Parameter, parameter)


def expert_parameter(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns a parameter of this rank's experts."""
    return marked(nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config))))


def marked(parameter: Any) -> nn.Parameter:
    """Sets the attributes by which megatron-core's optimizer and gradient norm recognize a parameter of experts."""
    parameter.allreduce = False  # its replicas are those of the expert, not of dense layers
    parameter.tensor_model_parallel = (
        True  # no tensor-parallel rank has a copy, so every rank's part counts in the norm
    )
    parameter.partition_dim, parameter.partition_stride = 0, 1
    return cast(nn.Parameter, parameter)


class DividedModule(MegatronModule):
    """A module with parameters that may be divided over TP."""

    divided_axes: Mapping[str, int] = MappingProxyType({})
    """Axis that TP divides, by name of the parameter; all other parameters are replicated."""

    def __init__(self, config: TransformerConfig, tp: dist.ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes all parameters, including those of submodules, for checkpoints."""
        assert metadata is not None, "megatron-core passes it to every layer"
        tensors: dict[str, ShardedTensor] = make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            self.divided_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | tensors


def input_projection(
    config: TransformerConfig, columns: int, rows: int, tp: dist.ProcessGroup, kind: Any = ColumnParallelLinear
) -> Any:
    """Builds a column-parallel projection without bias; TP divides its `rows`."""
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
    """Builds the row-parallel projection from heads to the output of a layer; TP divides its `width` channels."""
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
        # megatron-core recomputes the core only in its SelfAttention
        self.recomputes_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def attended(self, *arguments: Any) -> Tensor:
        """Calls the core, which is recomputed in backward if configured."""
        if self.recomputes_core and self.training:
            return checkpoint(self.core_attention, False, *arguments)  # False: does not spread saved tensors over TP
        return self.core_attention(*arguments)
