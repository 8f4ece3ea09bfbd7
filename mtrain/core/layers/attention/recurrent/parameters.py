"""Parameters of layers with a state: projections, the convolution, and those of heads, all divided over TP."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mtrain.core.layers.own_parameters import DividedModule, divided_parameter


class Convolution(DividedModule):
    """Weights of a causal convolution, each channel by itself; a call returns them for the core, which convolves after
    the exchange of context parallelism."""

    divided_axes = MappingProxyType({"weight": 0, "bias": 0})
    bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, channels: int, kernel: int, tp: dist.ProcessGroup, has_bias: bool = False
    ) -> None:
        """
        Args:
            kernel: Number of tokens that a channel sees.
            tp: Ranks that hold the other channels.
        """
        super().__init__(config, tp)
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
