"""The end of a model, its output layer or a head, and logits that are computed on demand.

The last stage returns hidden states and the weight that multiplies them. The caller decides which logits to compute: a
loss needs those of weighted tokens, generation those of one position.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

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

from mtrain.core.kernels import gradient_buffer, region
from mtrain.core.layers.products import widened


class Operands(NamedTuple):
    """The factors of the output layer's product."""

    hidden: Tensor
    """[seq, batch, hidden] of all tokens of this context-parallel rank, the same on all tensor-parallel ranks, over
    which backward sums the gradient."""
    weight: Tensor
    """[vocab_local, hidden]."""
    buffer: Tensor | None = None
    """Buffer to which the gradient of the weight must be added; None: autograd must return the gradient."""


class OutputLayer(ColumnParallelLinear):
    """megatron-core's output layer, extended to return the factors of its product instead of logits."""

    compiles_regions = False

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        tp: dist.ProcessGroup,
        takes_embeddings: bool,
        softcap: float | None,
    ) -> None:
        """Makes an output layer.

        Args:
            rows: Rows of the weight over all tensor-parallel ranks.
            takes_embeddings: Whether every call passes the weight, so that none is built.
            softcap: Bound of logits, see `softcapped`; None: unbounded.
        """
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
        self.softcap = softcap

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        as_operands: bool = False,
    ) -> tuple[Tensor, Tensor | None] | Operands:
        """Computes logits like megatron-core, or returns `Operands`.

        `Operands` take, under sp, one all-gather over TP and a reduce-scatter in backward; otherwise one all-reduce in
        backward.
        """
        # both in one method, since hooks that wait for parameters run in this call
        if not as_operands:
            return super().forward(input_, weight, runtime_gather_output)
        # a weight in lower precision is converted once for all chunks of tokens
        weight = self.weight if weight is None else weight
        table = weight.to(input_.dtype)
        buffer = gradient_buffer(weight) if self.gradient_accumulation_fusion else None
        if self.sequence_parallel:
            # not False, which would split the gradient, but here each rank has a summand of it
            return Operands(
                gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group),
                table,
                buffer,
            )
        return Operands(copy_to_tensor_model_parallel_region(input_, group=self.tp_group), table, buffer)


class ScoreHead(MegatronModule):
    """Head of a model that scores sequences, transformers' `score`: hidden size -> labels, called like `OutputLayer`.

    Every tensor-parallel rank has the whole matrix and computes the same numbers, so no gradient is summed over TP.
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
            # each rank has the whole gradient; backward selects its own positions
            group = self.tp_group
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=group)
        table = self.weight.to(input_.dtype)
        return Operands(input_, table) if as_operands else (input_ @ table.t(), None)


@dataclass(frozen=True)
class DeferredLogits:
    """Logits of one distribution, [seq, batch, vocab_local], that are not computed yet."""

    hidden: Tensor
    """[seq_local, batch, hidden]: this rank's part under sequence parallelism."""
    layer: OutputLayer | ScoreHead
    tied: torch.nn.Module | None
    """Module of the embedding table, [vocab_local, hidden], if the model ties it to the output; else None. Not the
    table itself: with sharded weights, the gathered table is another tensor."""

    def whole(self) -> Tensor:
        """Computes all logits, by megatron-core's linear layer."""
        logits: Tensor
        logits, _ = self.layer(self.hidden, weight=self._table())
        return self.capped(logits)

    def operands(self) -> Operands:
        """Returns the factors, for callers that multiply a few rows at a time and apply `capped`."""
        return self.layer(self.hidden, weight=self._table(), as_operands=True)

    def _table(self) -> Tensor | None:
        module: Any = self.tied
        weight: Tensor | None = None if module is None else module.weight
        return weight

    def capped(self, logits: Tensor) -> Tensor:
        """Applies the model's softcap to logits, if it has one."""
        cap = self.layer.softcap
        return logits if cap is None else softcapped.compiled_if(self.layer.compiles_regions)(logits, cap)


@region(activations=1)
def softcapped(logits: Tensor, cap: float) -> Tensor:
    """Computes cap x tanh(logits / cap), in at least float32."""
    return cap * torch.tanh(widened(logits) / cap)


class Logits(NamedTuple):
    """Output of the last stage for one microbatch; no logits are computed yet."""

    main: DeferredLogits
    mtp: tuple[DeferredLogits, ...] = ()
    """Logits of the MTP depths, from depth 1."""
