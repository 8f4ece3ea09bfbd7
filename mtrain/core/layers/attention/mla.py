"""Multi-head latent attention on megatron-core's parallel linears and our core attention.

Queries, and keys with values, are computed from low-rank latents; keys also have a rotary part that all heads share.
Down-projections and norms are replicated on every tensor-parallel rank (as in megatron-core's spec for
TransformerEngine); up-projections are divided by heads. Every latent that heads of several ranks read passes, together
with the shared rotary key, through a collective whose backward sums its gradient over the tensor-parallel group.

Context parallelism sends latents, not heads: kv_lora_rank + qk_rope_head_dim numbers per token instead of heads x
(qk_nope_head_dim + qk_rope_head_dim + v_head_dim). Keys and values are computed after the exchange.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; megatron-core's transformer/multi_latent_attention.py for the names.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from mtrain.config.schema.attention import LatentAttentionSection
from mtrain.config.schema.rope import RopeSection
from mtrain.core.kernels import region
from mtrain.core.layers.attention.core_attention import RowAttention
from mtrain.core.layers.attention.key_set import key_set
from mtrain.core.layers.attention.rotary import inverse_frequencies, latent_softmax_scale
from mtrain.core.layers.norm import Norm
from mtrain.core.layers.own_parameters import (
    OwnAttention,
    device_of,
    input_projection,
    output_projection,
    replicated_parameter,
)
from mtrain.core.layers.products import widened_linear


class ReplicatedLinear(nn.Module):
    """A projection without bias, replicated on every tensor-parallel rank.

    Under sequence parallelism a rank projects only its own tokens, so gradients are summed over TP, like those of
    norms. Otherwise every rank computes the whole gradient, provided that the output passes through a collective that
    sums in backward.
    """

    def __init__(
        self, config: TransformerConfig, num_columns: int, num_rows: int, tp: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        values = torch.empty(num_rows, num_columns, dtype=config.params_dtype, device=device_of(config))
        self.weight = replicated_parameter(config, values)

    def forward(self, hidden: Tensor) -> Tensor:
        """Projects [..., columns] -> [..., rows]."""
        return widened_linear(hidden, self.weight)


class KeyValueProjection(ColumnParallelLinear):
    """A projection that only returns its weight; the core multiplies by it after the exchange over CP."""

    def forward(self) -> Tensor:
        """Returns the weight, [rows of this rank, kv_lora_rank].

        A call is necessary: megatron-core awaits an overlapped all-gather of a parameter when the owning module is
        called, so a weight read without a call could be that of the last step.
        """
        return self.weight


class LatentAttention(OwnAttention):
    """Multi-head latent attention; parameter names are those of megatron-core's MLASelfAttention."""

    compiles_regions = False
    replicated: Any = ReplicatedLinear
    norm: Any = Norm
    column: Any = ColumnParallelLinear
    keys_and_values: Any = KeyValueProjection
    row: Any = RowParallelLinear

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        latent: LatentAttentionSection,
        rope: RopeSection,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, pg_collection.tp)
        assert attn_mask_type == AttnMaskType.causal
        self.latent, self.is_interleaved = latent, rope.interleaved
        # yarn's factor of cos and sin; 1 without yarn
        self.magnitude = inverse_frequencies(rope, latent.qk_rope_head_dim)[1]
        self.heads_local = config.num_attention_heads // self.tp_group.size()
        epsilon = config.layernorm_epsilon if latent.norm_epsilon is None else latent.norm_epsilon
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, latent.kv_lora_rank
        if latent.q_lora_rank is None:
            self.linear_q_proj = self._divided(hidden, heads * latent.query_head_dim, self.column)
        else:
            self.linear_q_down_proj = self.replicated(config, hidden, latent.q_lora_rank, self.tp_group)
            self.q_layernorm = self.norm(config, latent.q_lora_rank, epsilon)
            self.linear_q_up_proj = self._divided(latent.q_lora_rank, heads * latent.query_head_dim, self.column)
        self.linear_kv_down_proj = self.replicated(config, hidden, rank + latent.qk_rope_head_dim, self.tp_group)
        # not fused into the next projection, since its epsilon may differ from that of the model's norms
        self.kv_layernorm = self.norm(config, rank, epsilon)
        num_rows = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.linear_kv_up_proj = self._divided(rank, num_rows, self.keys_and_values)
        scale = latent_softmax_scale(latent, rope)
        self.core_attention = self._core(layer_number, scale, cp_comm_type, pg_collection)
        self.linear_proj = output_projection(config, heads * latent.v_head_dim, self.tp_group, self.row)

    def _divided(self, num_columns: int, num_rows: int, kind: Any) -> Any:
        return input_projection(self.config, num_columns, num_rows, self.tp_group, kind)

    def _core(
        self, layer_number: int, scale: float, cp_comm_type: str | None, groups: ProcessGroupCollection
    ) -> nn.Module:
        return LatentCore(self.config, layer_number, self.latent, scale, cp_comm_type, groups)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: object = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
        sequence_len_offset: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attends causally inside documents; returns the output and no bias.

        hidden_states and output are [seq_local, batch, hidden], under sequence parallelism [seq_local / tp, batch,
        hidden]; attention_mask is that of `CoreAttention.forward`; rotary_pos_emb holds angles [seq_local, batch or 1,
        1, qk_rope_head_dim], float32. All other arguments belong to megatron-core's protocol and are None.
        """
        assert inference_context is None
        assert packed_seq_params is None
        assert rotary_pos_emb is not None
        output, _ = self.linear_proj(self._context(hidden_states, rotary_pos_emb, attention_mask))
        return output, None

    def _context(self, hidden_states: Tensor, angles: Tensor, document_starts: Tensor | None) -> Tensor:
        """Returns [seq_local, batch, heads_local * v_head_dim]."""
        query = self._queries(hidden_states, angles)
        latent, rotary_key = self._latent_and_rotary_key(hidden_states, angles)
        # the core computes keys and values, so that recomputation saves only their latents for backward
        return self.attended(query, latent, rotary_key, self.linear_kv_up_proj(), document_starts)

    def _queries(self, hidden: Tensor, angles: Tensor) -> Tensor:
        """Returns [seq_local, batch, heads_local, nope + rope]."""
        if self.latent.q_lora_rank is None:
            projected, _ = self.linear_q_proj(hidden)
        else:
            # the collective of the up-projection (all-gather under sp, else a copy) sums the gradient of the latent
            # over TP in backward
            projected, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        heads = projected.view(*projected.shape[:2], self.heads_local, self.latent.query_head_dim)
        nope, rotary = torch.split(heads, [self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim], dim=-1)
        return torch.cat((nope, self._rotated(rotary, angles)), dim=-1)

    def _latent_and_rotary_key(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [seq_local, batch, kv_lora_rank] and [seq_local, batch, rope], the same on all tensor-parallel ranks.

        Under sp one all-gather over TP, and a reduce-scatter in backward; otherwise one all-reduce in backward.
        """
        sizes = [self.latent.kv_lora_rank, self.latent.qk_rope_head_dim]
        latent, rotary_key = torch.split(self.linear_kv_down_proj(hidden), sizes, dim=-1)
        # normalized before the collective, so that under sp each rank normalizes only its own tokens
        both = torch.cat((self.kv_layernorm(latent), rotary_key), dim=-1)
        if self.config.sequence_parallel:
            both = gather_from_sequence_parallel_region(both, group=self.tp_group)
        else:
            both = copy_to_tensor_model_parallel_region(both, group=self.tp_group)
        # rotated after the gather, since the angles are those of all tokens of this CP rank
        latent, rotary_key = torch.split(both, sizes, dim=-1)
        return latent, self._rotated(rotary_key.unsqueeze(2), angles).squeeze(2)

    def _rotated(self, part: Tensor, angles: Tensor) -> Tensor:
        rotate = pairs_rotated.compiled_if(self.compiles_regions)
        return rotate(part, angles, self.magnitude, self.is_interleaved)


@region(activations=1)
def pairs_rotated(part: Tensor, angles: Tensor, magnitude: float, is_interleaved: bool) -> Tensor:
    """Rotates the pairs of dimensions of [seq, batch, heads, rope] by the first half of the angles; returns pairs as
    (i, i + rope / 2), even if they arrive interleaved."""
    if is_interleaved:
        real, imaginary = part[..., 0::2], part[..., 1::2]
    else:
        real, imaginary = part.chunk(2, dim=-1)
    half = angles[..., : real.shape[-1]]  # the second half repeats the first for megatron-core's rotation
    # in float32 up to here, since bfloat16 cannot distinguish positions above 256
    cosine = (half.cos() * magnitude).to(part.dtype)
    sine = (half.sin() * magnitude).to(part.dtype)
    return torch.cat((real * cosine - imaginary * sine, imaginary * cosine + real * sine), dim=-1)


class LatentCore(RowAttention):
    """Attention to keys and values computed from latents, which are exchanged over CP first."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: LatentAttentionSection,
        softmax_scale: float,
        cp_comm_type: str | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, layer_number, cp_comm_type, softmax_scale, pg_collection)
        self.latent = latent

    def forward(
        self, query: Tensor, latent: Tensor, rotary_key: Tensor, weight: Tensor, document_starts: Tensor | None
    ) -> Tensor:
        """Attends to whole rows. One all-gather of latents over CP; under Ulysses also an exchange of queries and
        outputs.

        Args:
            query: [seq_local, batch, heads_local, nope + rope].
            latent: [seq_local, batch, kv_lora_rank].
            rotary_key: [seq_local, batch, rope].
            weight: Up-projection, [heads_local * (nope + value), kv_lora_rank].

        Returns:
            [seq_local, batch, heads_local * v_head_dim].
        """
        # one collective for both; with all-gather every CP rank repeats the projection below for the whole row, the
        # price of sending only latents
        rows = self.source.rows(torch.cat((latent, rotary_key), dim=-1))
        by_head = self.source.own_heads(weight.view(query.shape[2], -1, self.latent.kv_lora_rank))
        key, value = self._keys_and_values(rows, by_head)
        return self.attend(query, key, value, key_set(document_starts, self.window))

    def _keys_and_values(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Computes keys, [seq, batch, heads, nope + rope], and values, [seq, batch, heads, value], from latents with
        rotary keys, [seq, batch, kv_lora_rank + rope], by a weight [heads, nope + value, kv_lora_rank]."""
        sizes, shape = self.latent, (*rows.shape[:2], len(weight))
        latent, rotary_key = torch.split(rows, [sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = widened_linear(latent, weight.flatten(0, 1)).view(*shape, -1)
        nope, value = torch.split(expanded, [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        # a view that all heads share; autograd sums their gradients
        shared = rotary_key.unsqueeze(2).expand(*shape, sizes.qk_rope_head_dim)
        return torch.cat((nope, shared), dim=-1), value
