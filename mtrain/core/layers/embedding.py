"""An embedding table whose gradient is added to its buffer row by row."""

from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain.core.kernels import add_rows, added_gradient, gradient_buffer


class EmbeddingTable(VocabParallelEmbedding):
    """megatron-core's embedding table, for fused weight gradients; the state is the same.

    megatron-core would make a gradient of the whole table for each microbatch, however few rows it has.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Looks tokens up, [batch, seq], and sums over TP: [batch, seq, hidden], or under sp [seq_local, batch,
        hidden]."""
        buffer = gradient_buffer(self.weight)
        if buffer is None:
            frozen: Tensor = super().forward(input_)
            return frozen
        rows = input_ - self.vocab_start_index
        is_here = (rows >= 0) & (rows < self.num_embeddings_per_partition)
        found = _LookedUp.apply(self.weight, buffer, torch.where(is_here, rows, 0))  # type: ignore[no-untyped-call]
        if self.tp_group.size() > 1:
            found = torch.where(is_here.unsqueeze(-1), found, 0.0)
        if self.reduce_scatter_embeddings:
            found = found.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(found, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(found, group=self.tp_group)


class _LookedUp(torch.autograd.Function):
    """Autograd node (table) -> its rows of some tokens."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buffer: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.buffer = weight, buffer
        return functional.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        add_rows(rows.flatten(), gradient.flatten(0, -2), ctx.buffer)
        return added_gradient(ctx.weight), None, None
