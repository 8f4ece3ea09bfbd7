"""Parameters of layers with a state: projections, the convolution, and those of heads, all divided over TP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from mtrain.core.layers.own_parameters import ShardedOffsets, own_places


class Convolution(MegatronModule):
    """Weights of a causal convolution, each channel by itself; a call returns them for the core, which convolves after
    the exchange of context parallelism."""

    bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, channels: int, kernel: int, tp: dist.ProcessGroup, has_bias: bool = False
    ) -> None:
        """
        Args:
            config: Configuration of the model.
            kernel: Number of tokens that a channel sees.
            tp: Ranks that hold the others.
            has_bias: Whether each channel has a bias.
        """
        super().__init__(config=config)
        self.tp_group = tp
        # with an axis of one input, as torch's Conv1d has it
        self.weight = divided_parameter(config, torch.empty(channels, 1, kernel))
        if has_bias:
            self.bias = divided_parameter(config, torch.zeros(channels))
        else:
            self.register_parameter("bias", None)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Returns [channels, kernel], and [channels] or no bias.

        megatron-core waits for an overlapped gathering before the call of the module that owns the parameter, see
        `KeyValueProjection`.
        """
        return self.weight.squeeze(1), self.bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the places of the parameters, whose channels are divided over TP."""
        return own_places(self, {"weight": 0, "bias": 0}, self.tp_group, prefix, sharded_offsets, metadata)


def input_projection(config: TransformerConfig, rows: int, tp: dist.ProcessGroup) -> ColumnParallelLinear:
    """Builds the projection of a layer's input, whose `rows` are divided over TP."""
    return ColumnParallelLinear(
        config.hidden_size,
        rows,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        tp_group=tp,
    )


def output_projection(config: TransformerConfig, width: int, tp: dist.ProcessGroup) -> RowParallelLinear:
    """Builds the projection of the heads, `width` channels that are divided over TP, to a layer's output."""
    return RowParallelLinear(
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


def device_of(config: TransformerConfig) -> str | int:
    """Returns the device on which parameters are built."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def divided_parameter(config: TransformerConfig, values: Tensor) -> nn.Parameter:
    """Returns this rank's part of a parameter whose first axis is divided over TP: the gradient norm counts those of
    every rank."""
    parameter = nn.Parameter(values.to(dtype=config.params_dtype, device=device_of(config)))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
