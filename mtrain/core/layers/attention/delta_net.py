"""The gated delta net, which replaces attention in a layer, on megatron-core's parallel linears.

Each value head has a state S, [key_dim, value_dim]. A token with unit-length query q and key k, value v, log decay g
and step beta decays the state, corrects its content at k, and reads it at q:

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    output = S^T q / sqrt(key_dim)

Rows are computed chunk by chunk. Inside a chunk the corrections solve a triangular system, since each depends on those
before it.

One projection yields the queries, keys and values of the delta rule, a gate for its output, and two numbers per value
head that determine the decay and the step of a token. Its rows are grouped by key head, and TP divides whole groups:
under any tp, each rank has a contiguous part of every parameter and communicates no more than for attention. Only the
gated norm is replicated; each rank applies it to its own heads, so its gradients are summed over TP.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, arXiv 2412.06464, section 3.3; transformers,
models/qwen3_next/modeling_qwen3_next.py, for the variant of Qwen3-Next; megatron-core's ssm/gated_delta_net.py for the
names.
"""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.delta_net import DeltaNetSection
from mtrain.core.kernels import region
from mtrain.core.layers.attention.recurrent.chunks import Chunks, Projected, applied, by_chunk, chunk_decays
from mtrain.core.layers.attention.recurrent.core import Convolution, Heads, RecurrentCore
from mtrain.core.layers.own_parameters import (
    OwnAttention,
    device_of,
    divided_parameter,
    input_projection,
    output_projection,
)
from mtrain.core.layers.products import widened

_DECAYS = 0.01, 16.0
"""Bounds of the uniform initial decay rates, as in transformers; the parameters are their logarithms."""
EPSILON = 1e-6
"""Added to the squared length of a query or key before it is divided by its length."""


def delta_rule(
    tokens: Projected, document_starts: Tensor | None = None, chunk: int = 64, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Applies the gated delta rule to every row.

    Args:
        document_starts: Index at which each token's document starts, [batch, seq], relative to the first token here, so
            negative for a document that starts earlier. None: no document starts after the first token.
        state: State before the first token, [batch, value_heads, key_dim, value_dim]; None: 0.

    Returns:
        Outputs in the shape and dtype of value, and the state after the last token.
    """
    return applied(row_chunks(tokens, document_starts, chunk), tokens.value, state)


def row_chunks(tokens: Projected, document_starts: Tensor | None, chunk: int) -> Chunks:
    """Solves every chunk for a still unknown state; the arguments are those of `delta_rule`."""
    seq, _, heads, key_dim = tokens.key.shape
    chunk = min(chunk, seq)
    query, key, value, log_decay, beta = (by_chunk(part, heads, chunk) for part in tokens)
    query, key = _unit(query) / math.sqrt(key_dim), _unit(key)
    decays, from_start = chunk_decays(log_decay, document_starts, seq)
    beta = beta.unsqueeze(-1)
    # (1 + system below the diagonal) corrections = beta (v - content of the state at the start of the chunk)
    system = beta * (key @ key.mT) * decays
    sides = torch.cat((beta * value, beta * from_start.unsqueeze(-1) * key), dim=-1)
    # unitriangular: the solver ignores the diagonal (1) and everything above it (0)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, erasing = torch.split(solved, [value.shape[-1], key_dim], dim=-1)
    return Chunks(
        values=values,
        erasing=erasing,
        reading=from_start.unsqueeze(-1) * query,
        attention=(query @ key.mT) * decays,
        # the last row has the decays from each token to the end of the chunk
        writing=decays[..., -1, :].unsqueeze(-1) * key,
        decay=from_start[..., -1][..., None, None],
    )


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)


class DeltaNetCore(RecurrentCore):
    """Replacement of core attention in a delta net."""

    rule: Callable[[Projected, Tensor | None], Tensor] | None = None
    """Function of another library that computes the outputs of whole rows; None: our code."""

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Solves the chunks of rows by the delta rule."""
        return row_chunks(tokens, document_starts, self.chunk)

    def outputs(self, tokens: Projected, document_starts: Tensor | None, skip: Tensor | None) -> Tensor:
        """Applies the delta rule to whole rows; `skip` is always None."""
        if self.rule is None:
            return super().outputs(tokens, document_starts, skip)
        return self.rule(tokens, document_starts)


class GatedDeltaNet(OwnAttention):
    """Replacement of attention in a layer, with a state instead of keys and values."""

    divided_axes = MappingProxyType({"A_log": 0, "dt_bias": 0})

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        delta_net: DeltaNetSection,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **options: Any,  # of newer versions
    ) -> None:
        super().__init__(config, pg_collection.tp)
        self.heads = heads_of_rank(delta_net, pg_collection.tp.size())
        width = delta_net.value_width
        rows = 2 * (delta_net.key_width + width + delta_net.num_value_heads)
        # q, k, v, gate, step, decay
        self.in_proj = input_projection(config, config.hidden_size, rows, self.tp_group)
        channels = (2 * delta_net.key_width + width) // self.tp_group.size()
        self.conv1d = Convolution(config, channels, delta_net.conv_kernel, self.tp_group)
        self.dt_bias = divided_parameter(config, torch.ones(self.heads.value_heads))
        # zeros until `init_weights` draws them or a checkpoint is loaded
        self.A_log = divided_parameter(config, torch.zeros(self.heads.value_heads))
        self.core_attention = DeltaNetCore(self.heads, pg_collection.cp, cp_comm_type)
        self.out_norm = GatedNorm(config, delta_net.value_head_dim, self.tp_group)
        self.out_proj = output_projection(config, width, self.tp_group)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """Reads tokens in order, [seq_local, batch, hidden], with a new state for each document, see `key_set`.

        All other arguments belong to megatron-core's protocol and are ignored. Returns the output in the shape of the
        input, and no bias.
        """
        heads, shared = self.heads, self.heads.value_heads // self.heads.key_heads
        projected, _ = self.in_proj(hidden_states)
        # [seq_local, batch, key_heads, rows of one]
        grouped = projected.unflatten(-1, (heads.key_heads, -1))
        sizes = [heads.channels, shared * heads.value_dim, shared, shared]
        mixed, gate, step, decay = torch.split(grouped, sizes, dim=-1)
        weight, _ = self.conv1d()
        log_decay = self._log_decay(decay.flatten(2))
        context = self.attended(mixed.flatten(2), weight, log_decay, step.flatten(2).sigmoid(), attention_mask)
        by_head = torch.unflatten(context, -1, (heads.value_heads, heads.value_dim))
        output, _ = self.out_proj(self.out_norm(by_head, gate.reshape(by_head.shape)).flatten(2))
        return output, None

    def _log_decay(self, projected: Tensor) -> Tensor:
        """Returns the log decay of each head, below 0, [seq_local, batch, value_heads], in at least float32."""
        wide = widened(projected)
        return -self.A_log.to(wide.dtype).exp() * functional.softplus(wide + self.dt_bias.to(wide.dtype))


def first_log_decays(uniform: Tensor) -> Tensor:
    """Returns the initial `A_log` of heads from uniform numbers between 0 and 1."""
    least, most = _DECAYS
    return (least + (most - least) * uniform).log()


def heads_of_rank(delta_net: DeltaNetSection, tp: int) -> Heads:
    """Returns the heads of a tensor-parallel rank."""
    return Heads(
        delta_net.num_key_heads // tp,
        delta_net.num_value_heads // tp,
        delta_net.key_head_dim,
        delta_net.value_head_dim,
    )


class GatedNorm(nn.Module):
    """RMSNorm of each head, with one weight for all of them, multiplied by silu of a gate."""

    compiles_regions = False

    def __init__(self, config: TransformerConfig, size: int, tp: dist.ProcessGroup) -> None:
        """Builds the norm for heads of `size` dimensions, which tensor-parallel ranks divide."""
        super().__init__()
        self.epsilon, self.tp = config.layernorm_epsilon, tp
        # without attributes of tensor parallelism, since it is replicated; ones even with model.zero_centered_norm
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device_of(config)))

    def forward(self, heads: Tensor, gate: Tensor) -> Tensor:
        """Normalizes heads and multiplies by silu of the gate, both [seq, batch, heads_local, size].

        One all-reduce of the weight gradient over TP in backward. The normalized heads are rounded before the gate, as
        in transformers.
        """
        # each rank has a part of the gradient, with or without sequence parallelism
        weight = copy_to_tensor_model_parallel_region(widened(self.weight), group=self.tp)
        return normed_and_gated.compiled_if(self.compiles_regions)(heads, gate, weight, self.epsilon)


@region(activations=2)
def normed_and_gated(heads: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Computes `GatedNorm`; the weight is [size] in at least float32."""
    wide = widened(heads)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed.to(heads.dtype) * functional.silu(gate.to(wide.dtype))).to(heads.dtype)
