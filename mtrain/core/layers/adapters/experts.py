"""Adapters of routed experts: a pair for each of the two projections of every expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.adapter import AdapterSection
from mtrain.core.layers.adapters.adapter import LORA_A, LORA_B, Adapter
from mtrain.core.layers.moe.experts import Stack
from mtrain.core.layers.moe.grouped_gemm import Implementation, chosen_product


class ExpertAdapter(Adapter):
    """Matrices A [experts, rank, inputs] and B [experts, outputs, rank] of this rank's experts.

    Gate and up share A, as in PEFT's form for the fused experts of transformers. `Experts` names the parameters in
    checkpoints, with an axis of all experts.
    """

    def __init__(
        self, section: AdapterSection, config: TransformerConfig, stack: Stack, implementation: Implementation
    ) -> None:
        nn.Module.__init__(self)
        self._section, rank = section, section.rank_of("experts")
        count, rows, columns = stack.weight.shape
        # rows of `rank` numbers may not be aligned for the grouped product
        self._implementation: Implementation = "auto" if implementation == "grouped" else implementation
        self._sizes = (rows, columns, rank)
        for name, shape in ((LORA_A, (count, rank, columns)), (LORA_B, (count, rows, rank))):
            self.register_parameter(name, _parameter(shape, config))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Computes what is added to the projections of [count, columns] tokens, sorted by expert."""
        down, up = self.get_parameter(LORA_A), self.get_parameter(LORA_B)
        product = chosen_product(self._implementation, self._sizes, down)
        # every token is on one rank here, so each rank draws its own dropout
        kept = functional.dropout(tokens, self._section.dropout) if self._drops else tokens
        return product(product(kept, down, counts) * self._section.scale_of("experts"), up, counts)

    @property
    def _drops(self) -> bool:
        return self._section.dropout > 0 and self.training


def _parameter(shape: tuple[int, ...], config: TransformerConfig) -> nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter: Any = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))
    # as the experts' own weights: replicas are those of the expert, and each counts in the norm everywhere
    parameter.allreduce = False
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = 0, 1
    return parameter


def add_to_stack(adapter: ExpertAdapter) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """Returns a forward hook for the projection that has this adapter."""

    def hook(stack: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + adapter(*inputs[:2]) if adapter.is_on else output

    return hook
