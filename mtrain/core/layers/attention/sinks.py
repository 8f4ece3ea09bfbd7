"""Attention sinks on scaled_dot_product_attention.

A sink is a learned logit of a head that takes part in the softmax and belongs to no token, so that a head may attend
to nothing. Fused kernels do not return the softmax's divisor with a gradient, and a mask with a logit for each head
would take memory for every pair of tokens. So the sink is one of the keys: a further dimension of each query holds
sink / scale, a key before all others is 1 in that dimension and 0 elsewhere, and its value is 0. Its score is the sink,
exactly; every kernel can compute it, with its gradient, in memory that grows only with the tokens.

Source: gpt-oss-120b and gpt-oss-20b model card, arXiv 2508.10925, section 2.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
"""Number of added dimensions, though one would do: kernels on GPUs take head sizes in steps of eight."""


def sink_parameter(config: TransformerConfig, tp: torch.distributed.ProcessGroup) -> nn.Parameter:
    """Returns [heads_local] zeros, marked as split over TP, so that the gradient norm counts those of every rank."""
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    # Vectors are not drawn (init_weights.py): zeros are the initial sinks.
    sinks = torch.zeros(config.num_attention_heads // tp.size(), dtype=config.params_dtype, device=device)
    parameter = nn.Parameter(sinks)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def with_sink_keys(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of longer heads, with the sink as key 0.

    Args:
        query: [q, batch, heads, dim].
        key: [k, batch, groups, dim].
        value: [k, batch, groups, value_dim].
        scores: [heads], at least float32: the sink of each head divided by the scale of the scores.

    Returns:
        [q, batch, heads, dim + WIDTH], [1 + k, batch, groups, dim + WIDTH], [1 + k, batch, groups, value_dim + WIDTH].
    """
    dim = query.shape[-1]
    # the cast comes last, so that the gradient is summed over tokens in float32
    column = scores.unsqueeze(-1).expand(*query.shape[:3], 1).to(query.dtype)  # [q, batch, heads, 1]
    query = functional.pad(torch.cat((query, column), dim=-1), (0, WIDTH - 1))
    # pairs from the last axis on: WIDTH dimensions after, no groups, no rows, one key before
    key, value = (functional.pad(part, (0, WIDTH, 0, 0, 0, 0, 1, 0)) for part in (key, value))
    key[0, :, :, dim] = 1.0  # in place on what pad has made; its value stays 0, so it takes weight and adds nothing
    return query, key, value
