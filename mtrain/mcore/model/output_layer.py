"""What ends a model, the output layer or a head, and logits that nobody has computed yet.

The last stage hands on hidden states and the table that they are multiplied by. Who wants logits says which and how
many at a time: a loss needs those of the tokens that it weighs, generation those of one position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mtrain.mcore.model.own_parameters import ShardedOffsets, own_places


class Operands(NamedTuple):
    """What the output layer multiplies."""

    hidden: Tensor
    """[seq, batch, hidden], all that this context-parallel rank holds, the same on all tensor-parallel ranks; its
    gradient is summed over them in backward."""
    weight: Tensor
    """[vocab_local, hidden]."""


class OutputLayer(ColumnParallelLinear):
    """megatron-core's, which can also give what it would multiply."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        as_operands: bool = False,
    ) -> tuple[Tensor, Tensor | None] | Operands:
        """As megatron-core's, or `Operands`: one all-gather of the hidden states over TP under sequence parallelism,
        and in backward one reduce-scatter, or one all-reduce without."""
        # a form of this call, not a function beside it: hooks that wait for parameters to arrive stand at the call
        if not as_operands:
            output: tuple[Tensor, Tensor | None] = super().forward(input_, weight, runtime_gather_output)
            return output
        # a table held in less precision is widened once, for all chunks of the tokens
        table = (self.weight if weight is None else weight).to(input_.dtype)
        if self.sequence_parallel:
            # its own default divides the gradient among the ranks; here each has a part of the sum
            return Operands(
                gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group),
                table,
            )
        return Operands(copy_to_tensor_model_parallel_region(input_, group=self.tp_group), table)


class ScoreHead(MegatronModule):
    """The head of a model that judges sequences: hidden size -> labels, called as `OutputLayer` is.

    It is what transformers calls `score`: one matrix without a bias, after the final norm. Few labels cannot be divided
    over TP, so every rank of it has the whole matrix and computes the same numbers; no gradient of it has to be added
    up over TP, nor that of what it reads.
    """

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


@dataclass(frozen=True)
class DeferredLogits:
    """Logits [seq, batch, vocab_local] of one distribution, still to be computed."""

    hidden: Tensor
    """[seq_local, batch, hidden]: under sequence parallelism this rank's part."""
    layer: OutputLayer | ScoreHead
    tied: Tensor | None
    """[vocab_local, hidden] the table, where it is that of the embeddings."""

    def whole(self) -> Tensor:
        """All of them, by megatron-core's own linear layer."""
        logits: Tensor
        # [seq, batch, vocab_local]: divided over TP, not gathered
        logits, _ = self.layer(self.hidden, weight=self.tied)
        return logits

    def operands(self) -> Operands:
        """For who multiplies some rows at a time."""
        operands: Operands = self.layer(self.hidden, weight=self.tied, as_operands=True)
        return operands


class Logits(NamedTuple):
    """What the last stage says of one microbatch."""

    main: DeferredLogits
    """Of the next token."""
    mtp: tuple[DeferredLogits, ...] = ()
    """By depth, from 1, of the tokens behind it; empty where only the next one is predicted."""


def defer_output(model: GPTModel) -> None:
    """Makes the output layer of a last stage one that can be deferred; its parameters stay what they are."""
    # GPTModel names the class itself and takes no spec for it. The subclass has the same state, so the layer that is
    # there, its table already marked by megatron-core, only changes its class.
    assert type(model.output_layer) is ColumnParallelLinear
    model.output_layer.__class__ = OutputLayer
    # A table can have a gradient of `Operands` in the same backward pass, which would be taken for added.
    model.output_layer.gradient_accumulation_fusion = False


def put_head(model: GPTModel, num_labels: int) -> None:
    """Puts a head in the place of the output layer of a last stage, which is freed."""
    model.output_layer = ScoreHead(model.config, num_labels, model.pg_collection.tp)
