"""Mamba-2, which replaces attention in a layer, on megatron-core's parallel linears.

Each head has a state S, [state_dim, head_dim]; the heads of a group share a key B and a query C. A token with input x,
log decay g and step d decays the state, adds to it, and reads it:

    S <- exp(g) S + d B x^T
    output = S^T C

Unlike in the delta rule, a token's contribution does not depend on the state, so a chunk needs only sums.

One projection yields inputs, B, C, a gate for the output, and the step of each head. Its rows are grouped by group of
heads, and TP divides whole groups: under any tp, each rank has a contiguous part of every parameter and communicates no
more than for attention. The norm is over each group, so it needs no other rank.

Sources: Dao, Gu, "Transformers are SSMs", 2024, arXiv 2405.21060, section 6; transformers,
models/nemotron_h/modeling_nemotron_h.py, for the variant of Nemotron-H; megatron-core's ssm/mamba_mixer.py for the
names.
"""

import math
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from mtrain.config.schema.mamba import MambaSection
from mtrain.core.kernels import region
from mtrain.core.layers.attention.recurrent.chunks import Chunks, Projected, by_chunk, chunk_decays
from mtrain.core.layers.attention.recurrent.core import Convolution, Heads, RecurrentCore
from mtrain.core.layers.own_parameters import (
    DividedModule,
    OwnAttention,
    divided_parameter,
    input_projection,
    output_projection,
)
from mtrain.core.layers.products import widened


class MambaCore(RecurrentCore):
    """Replacement of core attention in Mamba-2; each group of heads is a key head with key B and query C."""

    def chunks(self, tokens: Projected, document_starts: Tensor | None) -> Chunks:
        """Sums the chunks of rows by the rule of Mamba-2."""
        return row_chunks(tokens, document_starts, self.chunk)


def row_chunks(tokens: Projected, document_starts: Tensor | None, chunk: int) -> Chunks:
    """Sums the contributions of every chunk to a still unknown state; arguments as for `delta_rule`, with queries C,
    keys B and values x."""
    seq, _, groups, _ = tokens.key.shape
    query, key, value, log_decay, step = (by_chunk(part, groups, min(chunk, seq)) for part in tokens)
    decays, from_start = chunk_decays(log_decay, document_starts, seq)
    return Chunks(
        values=step.unsqueeze(-1) * value,
        erasing=None,
        reading=from_start.unsqueeze(-1) * query,
        attention=(query @ key.mT) * decays,
        # the last row has the decays from each token to the end of the chunk
        writing=decays[..., -1, :].unsqueeze(-1) * key,
        decay=from_start[..., -1][..., None, None],
    )


class MambaMixer(OwnAttention):
    """Replacement of attention in a layer, with a state instead of keys and values."""

    divided_axes = MappingProxyType({"A_log": 0, "dt_bias": 0, "D": 0})

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mamba: MambaSection,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        **options: Any,  # of newer versions
    ) -> None:
        super().__init__(config, pg_collection.tp)
        self.step_min = mamba.step_min
        tp, rank = self.tp_group.size(), self.tp_group.rank()
        self.heads = Heads(mamba.num_groups // tp, mamba.num_heads // tp, mamba.state_dim, mamba.head_dim)
        # C, B, inputs, gate, step
        rows = mamba.channels + mamba.width + mamba.num_heads
        self.in_proj = input_projection(config, config.hidden_size, rows, self.tp_group)
        self.conv1d = Convolution(config, mamba.channels // tp, mamba.conv_kernel, self.tp_group, mamba.conv_bias)
        # zeros until `init_weights` draws them or a checkpoint is loaded
        self.dt_bias = divided_parameter(config, torch.zeros(self.heads.value_heads))
        rates = torch.arange(1, mamba.num_heads + 1, dtype=torch.float32).log()
        self.A_log = divided_parameter(config, rates.chunk(tp)[rank])
        self.D = divided_parameter(config, torch.ones(self.heads.value_heads))
        self.core_attention = MambaCore(self.heads, pg_collection.cp, cp_comm_type)
        self.out_norm = GroupNorm(config, self.heads, self.tp_group)
        self.out_proj = output_projection(config, mamba.width, self.tp_group)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> tuple[Tensor, None]:
        """Reads tokens in order, [seq_local, batch, hidden], with a new state for each document, see `key_set`.

        All other arguments belong to megatron-core's protocol and are ignored. Returns the output in the shape of the
        input, and no bias.
        """
        heads, shared = self.heads, self.heads.value_heads // self.heads.key_heads
        projected, _ = self.in_proj(hidden_states)
        # [seq_local, batch, groups, rows of one]
        grouped = projected.unflatten(-1, (heads.key_heads, -1))
        mixed, gate, step = torch.split(grouped, [heads.channels, shared * heads.value_dim, shared], dim=-1)
        step = self._step(widened(step.flatten(2)))
        weight, bias = self.conv1d()
        log_decay = -self.A_log.to(step.dtype).exp() * step
        context = self.attended(mixed.flatten(2), weight, log_decay, step, attention_mask, bias, self.D)
        output, _ = self.out_proj(self.out_norm(context, gate.flatten(2)))
        return output, None

    def _step(self, projected: Tensor) -> Tensor:
        """Returns the step of each head, [seq_local, batch, heads], in at least float32, since steps add up."""
        step = functional.softplus(projected + self.dt_bias.to(projected.dtype))
        return step.clamp(min=self.step_min) if self.step_min else step


class GroupNorm(DividedModule):
    """RMSNorm over each group of heads, after multiplication by silu of a gate; each channel has its own weight."""

    divided_axes = MappingProxyType({"weight": 0})
    compiles_regions = False

    def __init__(self, config: TransformerConfig, heads: Heads, tp: dist.ProcessGroup) -> None:
        super().__init__(config, tp)
        self.epsilon, self.groups = config.layernorm_epsilon, heads.key_heads
        # ones even with model.zero_centered_norm
        self.weight = divided_parameter(config, torch.ones(heads.value_heads * heads.value_dim))

    def forward(self, context: Tensor, gate: Tensor) -> Tensor:
        """Multiplies by silu of the gate, then normalizes; all [seq_local, batch, heads_local x size].

        The normalized values are rounded before the weight, as in transformers.
        """
        normalise = gated_and_normed.compiled_if(self.compiles_regions)
        return normalise(context, gate, self.weight, self.epsilon, self.groups)


@region(activations=2)
def gated_and_normed(context: Tensor, gate: Tensor, weight: Tensor, epsilon: float, groups: int) -> Tensor:
    """Computes `GroupNorm`."""
    wide = widened(context)
    gated = torch.unflatten(wide * functional.silu(gate.to(wide.dtype)), -1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + epsilon)
    return weight * normed.flatten(2).to(context.dtype)


def first_step_biases(uniform: Tensor) -> Tensor:
    """Returns initial biases from uniform numbers, so that first steps have uniform logarithms as in transformers."""
    least, most, floor = math.log(0.001), math.log(0.1), 1e-4
    steps = (least + (most - least) * uniform).exp().clamp(min=floor)
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
