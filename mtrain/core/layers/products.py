"""Products of linear layers with an operand in lower precision, and the embedding, whose gradients have a buffer.

Frozen bfloat16 weights are widened to the precision of the inputs. Gradients of half-precision weights are added to
their float32 buffer without a separate pass, for which megatron-core calls apex's extension
(`gradient_accumulation_fusion`). torch has the same products, in float32 everywhere, and on GPUs from half-precision
factors to float32, so that the gradient of a microbatch is never rounded. Other devices compute the product and add it,
as without fusion. The embedding adds to its buffer only the rows of its tokens.
"""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain.core.kernels import add_product, add_rows, added_gradient, gradient_buffer


def widened(x: Tensor) -> Tensor:
    """Converts to float32; wider dtypes stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def widened_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """Multiplies inputs, [..., columns], by a weight, [rows, columns], to [..., rows], in the precision of the inputs.

    A frozen weight in lower precision is converted for the product, and again in backward, so that only the narrow
    weight is saved.
    """
    if inputs.dtype == weight.dtype:
        return functional.linear(inputs, weight)
    assert not weight.requires_grad, "its gradient would be lost"
    return _WidenedLinear.apply(inputs, weight)  # type: ignore[no-untyped-call]


class _WidenedLinear(autograd.Function):
    """Converts the weight in both passes, since otherwise the graph would keep wide matrices until backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient.matmul(weight.to(gradient.dtype)), None


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


class _LookedUp(autograd.Function):
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


def install() -> None:
    """Replaces apex's extension by torch's products in linear layers that are built from now on."""
    import megatron.core.tensor_parallel.layers as layers

    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    module._grad_accum_fusion_available = True
