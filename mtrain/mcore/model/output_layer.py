"""The output layer, and logits that nobody has computed yet.

The last stage hands on hidden states and the table that they are multiplied by. Who wants logits says which and how
many at a time: a loss needs those of the tokens that it weighs, generation those of one position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

if TYPE_CHECKING:
    from mtrain.mcore.model.head import ScoreHead


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
