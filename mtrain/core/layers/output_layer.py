"""The end of a model, its output layer or a head, and logits that are computed on demand.

The last stage passes on hidden states and the table that multiplies them. The caller decides which logits are computed:
a loss needs those of the tokens that it weighs, generation those of one position.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mtrain.core.kernels import region
from mtrain.core.layers.products import widened


class Operands(NamedTuple):
    """The factors that the output layer multiplies."""

    hidden: Tensor
    """[seq, batch, hidden], all that this context-parallel rank holds, the same on all tensor-parallel ranks; backward
    sums their gradient over these."""
    weight: Tensor
    """[vocab_local, hidden]."""


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, which can also return the factors of its product."""

    compiles_regions = False

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        tp: dist.ProcessGroup,
        takes_embeddings: bool,
        softcap: float | None,
    ) -> None:
        """Takes the rows of the table on all TP ranks together; none is built if every call passes one."""
        super().__init__(
            config.hidden_size,
            rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            skip_weight_param_allocation=takes_embeddings,
            tp_group=tp,
        )
        # a table can also have a gradient of `Operands` in the same backward pass, which would be taken for added
        self.gradient_accumulation_fusion = False
        self.softcap = softcap

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        as_operands: bool = False,
    ) -> tuple[Tensor, Tensor | None] | Operands:
        """Computes logits like megatron-core, or returns `Operands`.

        The latter costs, under sp, one all-gather over TP and in backward one reduce-scatter; else one all-reduce in
        backward.
        """
        # in this call, since hooks that wait for parameters are on it
        if not as_operands:
            return super().forward(input_, weight, runtime_gather_output)
        # a table in lower precision is converted once, for all chunks of the tokens
        table = (self.weight if weight is None else weight).to(input_.dtype)
        if self.sequence_parallel:
            # its own default splits the gradient among the ranks; here each has a part of the sum
            return Operands(
                gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group),
                table,
            )
        return Operands(copy_to_tensor_model_parallel_region(input_, group=self.tp_group), table)


class ScoreHead(MegatronModule):
    """Head of a model that scores sequences: hidden size -> labels, called like `OutputLayer`; transformers' `score`.

    Every rank of TP has the whole matrix and computes the same numbers, so no gradient has to be summed over TP.
    """

    softcap, compiles_regions = None, False

    def __init__(self, config: TransformerConfig, rows: int, tp: dist.ProcessGroup) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(rows, config.hidden_size, dtype=config.params_dtype))
        self.output_size_per_partition = rows
        self.tp_group = tp

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, as_operands: bool = False
    ) -> tuple[Tensor, None] | Operands:
        """Returns [seq, batch, rows] and no bias, or the operands; one all-gather over TP under sp."""
        assert weight is None, "a head shares its matrix with nothing"
        if self.config.sequence_parallel:
            # each rank has the whole gradient, and in backward keeps that of its own positions
            group = self.tp_group
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=group)
        table = self.weight.to(input_.dtype)
        return Operands(input_, table) if as_operands else (input_ @ table.t(), None)


@dataclass(frozen=True)
class DeferredLogits:
    """Logits [seq, batch, vocab_local] of one distribution, still to be computed."""

    hidden: Tensor
    """[seq_local, batch, hidden]: this rank's part under sequence parallelism."""
    layer: OutputLayer | ScoreHead
    tied: Tensor | None
    """[vocab_local, hidden] table of the embeddings, if the model ties them; else None."""

    def whole(self) -> Tensor:
        """Computes all logits, by megatron-core's own linear layer."""
        logits: Tensor
        logits, _ = self.layer(self.hidden, weight=self.tied)
        return self.capped(logits)

    def operands(self) -> Operands:
        """Returns the factors, for callers that multiply some rows at a time and apply `capped`."""
        return self.layer(self.hidden, weight=self.tied, as_operands=True)

    def capped(self, logits: Tensor) -> Tensor:
        """Applies the model's bound of logits, if it has one."""
        cap = self.layer.softcap
        return logits if cap is None else softcapped.compiled_if(self.layer.compiles_regions)(logits, cap)


@region(activations=1)
def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Computes c tanh(logits / c), in float32 at least."""
    return cap * torch.tanh(widened(logits) / cap)


class Logits(NamedTuple):
    """Logits of the last stage for one microbatch, none of them computed yet."""

    main: DeferredLogits
    mtp: tuple[DeferredLogits, ...] = ()
    """Logits of further tokens, by depth from 1."""
