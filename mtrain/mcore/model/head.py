"""The head of a model that judges sequences: hidden size -> labels, in the place of the output layer.

It is what transformers calls `score`: one matrix without a bias, behind the final norm. Few labels cannot be divided
over TP, so every rank of it has the whole matrix and computes the same numbers; no gradient of it has to be added up
over TP, nor that of what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mtrain.mcore.model.output_layer import Operands
from mtrain.mcore.model.own_parameters import ShardedOffsets, own_places


class ScoreHead(MegatronModule):
    """Called as `OutputLayer` is."""

    def __init__(self, config: TransformerConfig, num_labels: int, tp: dist.ProcessGroup) -> None:
        """
        Args:
            config: Of the model.
            num_labels: Numbers that it makes of a position.
            tp: The ranks that have the same.
        """
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(num_labels, config.hidden_size, dtype=config.params_dtype))
        self.output_size_per_partition = num_labels
        self._tp = tp

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, as_operands: bool = False
    ) -> tuple[Tensor, None] | Operands:
        """[seq, batch, num_labels] and no bias, or the operands; one all-gather over TP under sequence parallelism."""
        assert weight is None, "a head shares its matrix with nothing"
        if self.config.sequence_parallel:
            # Not as the output layer, whose ranks have a part of the gradient each: here each has all of it, and in
            # backward keeps that of its own positions.
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=self._tp)
        table = self.weight.to(input_.dtype)
        return Operands(input_, table) if as_operands else (input_ @ table.t(), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: ShardedOffsets = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same on all ranks of TP."""
        places: dict[str, Any] = own_places(self, {}, self._tp, prefix, sharded_offsets, metadata)
        return places


def put_head(model: GPTModel, num_labels: int) -> None:
    """Puts a head in the place of the output layer of a last stage, which is freed."""
    model.output_layer = ScoreHead(model.config, num_labels, model.pg_collection.tp)
