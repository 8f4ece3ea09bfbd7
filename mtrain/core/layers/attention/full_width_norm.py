"""RMSNorm of queries and of keys over all heads at once, as in OLMo-2.

A tensor-parallel rank has some of the heads, but the mean of squares is over all of them. So ranks sum their squares of
queries and keys: one all-reduce over TP of two numbers per token in forward, and another in backward, where the
gradient of the mean needs products of all heads. Vectors, weights and gradients stay with their heads.

Source: OLMo 2 report, arXiv 2501.00656, section 3.2; Zhang and Sennrich 2019 (RMSNorm), arXiv 1910.07467.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain.core.layers.attention.rotating import is_rotated, with_rotation_factor
from mtrain.core.layers.own_parameters import DividedModule, divided_parameter
from mtrain.core.layers.products import widened

CHECKPOINT_NAMES = {
    "self_attention.qk_norm.q_": "self_attention.q_layernorm.",
    "self_attention.qk_norm.k_": "self_attention.k_layernorm.",
}
"""Names in checkpoints, where the norms have the names of per-head norms, but other shapes. The modules must not have
these names: megatron-core sums gradients of everything called q_layernorm over TP (finalize_model_grads.py), but these
weights are shards, not copies."""


class FullWidthNormAttention(SelfAttention):
    """Self-attention that normalizes queries and keys over all heads."""

    rotation_factor = 1.0
    rotary_size = 0

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,  # of newer versions
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection, **options)
        heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        self.qk_norm = FullWidthNorm(config, heads, self.pg_collection.tp)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns [seq, batch, heads_local, head_dim] each: the projections, with queries and keys normalized."""
        # an unsplit result, for the fused rotation, would bypass this norm
        assert split_qkv, "fused rotary embeddings are refused"
        assert not output_gate, "output gates are refused"
        query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
        query, key = self.qk_norm(query, key)  # SelfAttention rotates the result
        if self.rotation_factor != 1 and is_rotated(self):
            query, key = (with_rotation_factor(heads, self.rotary_size, self.rotation_factor) for heads in (query, key))
        return query, key, value


class FullWidthNorm(DividedModule):
    """The norms of queries and of keys, each over all heads of all tensor-parallel ranks."""

    divided_axes = MappingProxyType({"q_weight": 0, "k_weight": 0})

    def __init__(self, config: TransformerConfig, heads: tuple[int, int], tp: dist.ProcessGroup) -> None:
        """Builds the norms; `heads` are this rank's numbers of query heads and key heads."""
        super().__init__(config, tp)
        self.tp, self.epsilon = tp, config.layernorm_epsilon
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        assert config.kv_channels is not None
        initial = 0.0 if self.is_zero_centered else 1.0
        # one weight per dimension of each local head, whereas per-head norms share weights among heads
        self.q_weight, self.k_weight = (
            divided_parameter(config, torch.full((count * config.kv_channels,), initial)) for count in heads
        )

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalizes queries and keys, [seq, batch, heads_local, head_dim], of the whole sequence even under sp."""
        # gains are converted outside the Function, so that autograd rounds their gradients to the dtype of the weights
        return _Normalised.apply(  # type: ignore[no-untyped-call]
            query, key, self._gain(self.q_weight), self._gain(self.k_weight), self.epsilon, self.tp
        )

    def _gain(self, weight: Tensor) -> Tensor:
        return 1.0 + widened(weight) if self.is_zero_centered else widened(weight)


class _Normalised(torch.autograd.Function):
    """Maps x_i to g_i x_i / sqrt(mean x^2 + epsilon), with the mean over all ranks; in at least float32, rounded once.

    With n = x / sqrt(...), an output gradient d gives the input gradient (g d - n mean(g d n)) / sqrt(...).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_gain: Tensor,
        key_gain: Tensor,
        epsilon: float,
        tp: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        inputs, gains = (query, key), (query_gain, key_gain)
        # [seq, batch, 1, 1] each, over this rank's heads
        squares = [widened(x).square().sum((-2, -1), keepdim=True) for x in inputs]
        inverse_roots = [torch.rsqrt(mean + epsilon) for mean in _means(squares, inputs, tp)]
        # the inputs in their own dtype, not the float32 results, which are cheap to recompute and twice as large
        ctx.save_for_backward(*inputs, *gains, *inverse_roots)
        ctx.tp = tp
        outputs = [
            (widened(x) * root * gain.view(x.shape[-2:])).to(x.dtype)
            for x, gain, root in zip(inputs, gains, inverse_roots)
        ]
        return outputs[0], outputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, gains, inverse_roots = saved[0:2], saved[2:4], saved[4:6]
        normalised = [widened(x) * root for x, root in zip(inputs, inverse_roots)]
        weighed = [widened(d) * gain.view(d.shape[-2:]) for d, gain in zip(gradients, gains)]
        # over the heads of this rank; `_means` adds those of other ranks
        products = [(w * n).sum((-2, -1), keepdim=True) for w, n in zip(weighed, normalised)]
        input_gradients = [
            ((w - n * mean) * root).to(x.dtype)
            for w, n, mean, root, x in zip(weighed, normalised, _means(products, inputs, ctx.tp), inverse_roots, inputs)
        ]
        # not summed over TP, since each rank has its own shard of the weights
        gain_gradients = [(widened(d) * n).sum((0, 1)).flatten() for d, n in zip(gradients, normalised)]
        return *input_gradients, *gain_gradients, None, None


def _means(sums: list[Tensor], inputs: tuple[Tensor, ...], tp: dist.ProcessGroup) -> Tensor:
    """Turns sums over this rank's heads, [seq, batch, 1, 1] for each input, into means over all heads. One all-reduce
    over TP. Every rank must have the same number of heads."""
    total = torch.stack(sums)  # [2, seq, batch, 1, 1]: queries and keys share the latency of one all-reduce
    # in place, outside autograd; `backward` makes its own call
    if tp.size() > 1:
        dist.all_reduce(total, group=tp)
    widths = [x.shape[-2] * x.shape[-1] * tp.size() for x in inputs]
    return total / total.new_tensor(widths).view(-1, 1, 1, 1, 1)
