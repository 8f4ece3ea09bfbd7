"""Wrappers of TransformerEngine's modules: attention inside documents, latent attention, and experts."""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELinear,
    TENorm,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from torch import Tensor, nn
from torch.nn import functional

from mtrain.core.layers.attention.key_set import key_set
from mtrain.core.layers.attention.mla import LatentAttention
from mtrain.core.layers.moe.experts import Experts
from mtrain.core.layers.own_parameters import marked
from mtrain.core.layers.swiglu import Activation, weighted_activated


class DocumentAttention(TEDotProductAttention):
    """TransformerEngine's attention, restricted to the documents of each row.

    Only this module sees the packed form; projections, norms and rotation see rows, as with our attention.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        **options: Any,
    ) -> Tensor:
        """Attends causally to whole rows; arguments and result are those of `CoreAttention.forward`."""
        if attention_mask is None:
            return super().forward(query, key, value, None, *arguments, **options)
        seq, batch = query.shape[:2]
        segments = key_set(attention_mask, None).segments([(0, seq)], seq, query.device)
        # concatenated rows, [batch * seq, heads, dim]
        rows = [part.transpose(0, 1).flatten(0, 1) for part in (query, key, value)]
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=segments.query_ends,
            cu_seqlens_kv=segments.key_ends,
            max_seqlen_q=segments.longest_query,
            max_seqlen_kv=segments.longest_key,
        )
        output = super().forward(*rows, None, *arguments, **{**options, "packed_seq_params": packed})
        return output.reshape(batch, seq, -1).transpose(0, 1)


class ReplicatedTELinear(TELinear):
    """A projection without bias, replicated on every tensor-parallel rank; see `ReplicatedLinear`."""

    def __init__(
        self, config: TransformerConfig, num_columns: int, num_rows: int, tp: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__(
            num_columns,
            num_rows,
            parallel_mode="duplicated",
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            skip_weight_param_allocation=False,
        )
        self._tp_group = tp  # for checkpoints; TELinear does not accept it here
        # TransformerEngine 2.12 marks the weight as divided, so each copy would count in the gradient norm
        weight: Any = self.weight
        weight.tensor_model_parallel, weight.partition_dim = False, -1

    def forward(self, hidden: Tensor) -> Tensor:
        """Projects [..., columns] -> [..., rows]."""
        return super().forward(hidden)[0]


class TransformerEngineLatentAttention(LatentAttention):
    """Latent attention with TransformerEngine's projections and attention, and with our parameters.

    Keys and values are computed before the exchange over context-parallel ranks, which TransformerEngine's attention
    makes itself, with whole heads. megatron-core's module is not used, since it computes rotation angles of its own.
    """

    replicated, norm = ReplicatedTELinear, TENorm
    column = keys_and_values = TEColumnParallelLinear
    row = TERowParallelLinear

    def _core(
        self, layer_number: int, scale: float, cp_comm_type: str | None, groups: ProcessGroupCollection
    ) -> nn.Module:
        return DocumentAttention(
            config=self.config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=scale,
            k_channels=self.latent.query_head_dim,
            v_channels=self.latent.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
        )

    def _context(self, hidden_states: Tensor, angles: Tensor, document_starts: Tensor | None) -> Tensor:
        sizes = self.latent
        down = self.linear_kv_down_proj(hidden_states)
        latent, rotary_key = torch.split(down, [sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        # the collective of the projection covers only the latent; this one sums the gradient of the shared key over TP
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.tp_group)
        projected, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        heads = projected.view(*projected.shape[:2], self.heads_local, -1)
        nope, value = torch.split(heads, [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        shared = self._rotated(rotary_key.unsqueeze(2), angles).expand(*nope.shape[:3], -1)
        query, key = self._queries(hidden_states, angles), torch.cat((nope, shared), dim=-1)
        # the kernels need contiguous tensors, and values are a strided view of the projection
        return self.attended(query, key, value.contiguous(), document_starts)

    def attended(self, *arguments: Any) -> Tensor:
        return super().attended(*arguments, AttnMaskType.causal)


SHARED_EXPERTS = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)


class TransformerEngineExperts(Experts):
    """Experts with a tensor each, multiplied by TransformerEngine in one call; same checkpoints as `Experts`."""

    def _build(self, groups: ProcessGroupCollection) -> None:
        hidden_size, fc1_rows, ffn = self._row_sizes
        options = {
            "config": self.config,
            "init_method": self.config.init_method,
            "bias": self.config.add_bias_linear,
            "is_expert": True,
            "pg_collection": groups,
        }
        # TransformerEngine takes sizes over all expert-tensor-parallel ranks
        count, etp = self.num_local_experts, groups.expt_tp.size()
        self.linear_fc1 = TEColumnParallelGroupedLinear(
            count, hidden_size, fc1_rows * etp, **options, skip_bias_add=False
        )
        # the bias of fc2 is returned, since it must be weighted
        self.linear_fc2 = TERowParallelGroupedLinear(count, ffn * etp, hidden_size, **options, skip_bias_add=True)
        for parameter in self.parameters():
            marked(parameter)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Computes the weighted outputs of all experts like `Experts.forward`; the host waits for the counts."""
        counts, weights = tokens_per_expert.tolist(), weights.unsqueeze(-1)
        multiple = 1 if self.config.fp8 is None else get_fp8_align_size(self.config.fp8_recipe)
        padded_counts = [-(-count // multiple) * multiple for count in counts]
        hidden, _ = self.linear_fc1(_padded(tokens, counts, padded_counts), padded_counts)
        activate = weighted_activated.compiled_if(self.compiles_regions)
        hidden = activate(hidden, _padded(weights, counts, padded_counts), Activation.of(self.config))
        output, biases = self.linear_fc2(hidden, padded_counts)
        if padded_counts != counts:
            parts = torch.split(output, padded_counts)
            output = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        if biases is not None:
            by_token = torch.stack(biases).repeat_interleave(
                tokens_per_expert.to(output.device, non_blocking=True), dim=0, output_size=len(tokens)
            )
            output = output + (by_token * weights).to(tokens.dtype)
        return output, None


def _padded(rows: Tensor, counts: list[int], padded_counts: list[int]) -> Tensor:
    """Returns the rows of each expert, padded with zeros to its padded count."""
    if counts == padded_counts:
        return rows
    parts = zip(torch.split(rows, counts), padded_counts, strict=True)
    return torch.cat([functional.pad(part, (0, 0, 0, count - len(part))) for part, count in parts])
