"""The norm over all heads on the ranks of a TP group, for `test_full_width_norm.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.core.layers.attention.full_width_norm import FullWidthNorm
from mtrain.core.ranks.groups import Groups

HEAD_DIM = 6


class Example(NamedTuple):
    """Whole vectors of all heads, and the gradients of the norm's outputs."""

    query: Tensor
    """[seq, batch, heads, HEAD_DIM]; float64 or another dtype."""
    key: Tensor
    query_weight: Tensor
    """[heads * HEAD_DIM]."""
    key_weight: Tensor
    query_gradient: Tensor
    key_gradient: Tensor


class Found(NamedTuple):
    """Results of a rank's heads: outputs, gradients of inputs and of weights; sizes of all-reduces."""

    outputs: tuple[Tensor, Tensor]
    input_gradients: tuple[Tensor, Tensor]
    weight_gradients: tuple[Tensor, Tensor]
    reduced: list[int]


class _AllReduces(TorchDispatchMode):
    """Records the number of elements of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.c10d.allreduce_.default:
            self.sizes.append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def normalised(groups: Groups, example: Example, is_zero_centered: bool, epsilon: float) -> Found:
    """Runs forward and backward with the heads of this rank."""
    heads, key_heads = (part.shape[2] // groups.layout.tp for part in (example.query, example.key))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=example.query.shape[2],
        num_query_groups=example.key.shape[2],
        kv_channels=HEAD_DIM,
        layernorm_epsilon=epsilon,
        layernorm_zero_centered_gamma=is_zero_centered,
        params_dtype=example.query_weight.dtype,
        use_cpu_initialization=True,
        tensor_model_parallel_size=groups.layout.tp,
    )
    norm = FullWidthNorm(config, (heads, key_heads), groups.tp)

    def own(whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(groups.layout.tp, dim)[dist.get_rank(groups.tp)].clone()

    with torch.no_grad():
        norm.q_weight.copy_(own(example.query_weight, 0))
        norm.k_weight.copy_(own(example.key_weight, 0))
    query, key = own(example.query, 2).requires_grad_(), own(example.key, 2).requires_grad_()
    reduced = _AllReduces()
    with reduced:
        outputs = norm(query, key)
        torch.autograd.backward(outputs, (own(example.query_gradient, 2), own(example.key_gradient, 2)))
    of_query, of_key, of_query_weight, of_key_weight = (
        gradient_of(tensor) for tensor in (query, key, norm.q_weight, norm.k_weight)
    )
    detached = outputs[0].detach(), outputs[1].detach()
    return Found(detached, (of_query, of_key), (of_query_weight, of_key_weight), reduced.sizes)


def gradient_of(tensor: Tensor) -> Tensor:
    """Returns the gradient of a leaf that the backward pass has reached."""
    assert tensor.grad is not None
    return tensor.grad
