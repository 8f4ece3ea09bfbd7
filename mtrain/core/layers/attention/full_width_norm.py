"""RMSNorm of queries and of keys over all heads at once, as OLMo-2 has it.

A TP rank has some of the heads, but the mean of squares is over all heads. So ranks sum the squares that they hold, of
queries and keys together: one all-reduce over TP of two numbers per token in the forward pass, and one of two numbers
in the backward pass, where the mean's gradient needs the products of all heads. The vectors, weights and gradients stay
where their heads are.

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

from mtrain.core.layers.attention.rotating import grown, is_rotated
from mtrain.core.layers.own_parameters import DividedModule, divided_parameter
from mtrain.core.layers.products import widened

CHECKPOINT_NAMES = {
    "self_attention.qk_norm.q_": "self_attention.q_layernorm.",
    "self_attention.qk_norm.k_": "self_attention.k_layernorm.",
}
"""Names in checkpoints, which are those of norms of single heads, in another shape. The modules must not have them:
megatron-core sums the gradients of anything called q_layernorm over TP (finalize_model_grads.py), and these are parts,
not copies."""


class FullWidthNormAttention(SelfAttention):
    """Self-attention whose queries and keys are normalized before they are cut into heads."""

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
        # unsplit, for the fused rotation, queries and keys would be rotated without this norm
        assert split_qkv, "fused rotary embeddings are refused"
        assert not output_gate, "output gates are refused"
        query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states)
        query, key = self.qk_norm(query, key)  # before rotation, which SelfAttention applies to what this returns
        if self.rotation_factor != 1 and is_rotated(self):
            query, key = (grown(heads, self.rotary_size, self.rotation_factor) for heads in (query, key))
        return query, key, value


class FullWidthNorm(DividedModule):
    """The norms of queries and of keys, each over all heads of all ranks of TP."""

    divided_axes = MappingProxyType({"q_weight": 0, "k_weight": 0})

    def __init__(self, config: TransformerConfig, heads: tuple[int, int], tp: dist.ProcessGroup) -> None:
        """Builds the norms for this rank's numbers of query heads and key heads."""
        super().__init__(config, tp)
        self.tp, self.epsilon = tp, config.layernorm_epsilon
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        assert config.kv_channels is not None
        initial = 0.0 if self.is_zero_centered else 1.0
        # One element for each dimension of each head that the rank holds; norms of single heads share theirs among
        # heads.
        self.q_weight, self.k_weight = (
            divided_parameter(config, torch.full((count * config.kv_channels,), initial)) for count in heads
        )

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalizes queries and keys, [seq, batch, heads_local, head_dim]; under sp they are of the whole sequence."""
        # the gains are converted outside of the Function, so autograd rounds their gradients to the weights' dtype
        return _Normalised.apply(  # type: ignore[no-untyped-call]
            query, key, self._gain(self.q_weight), self._gain(self.k_weight), self.epsilon, self.tp
        )

    def _gain(self, weight: Tensor) -> Tensor:
        return 1.0 + widened(weight) if self.is_zero_centered else widened(weight)


class _Normalised(torch.autograd.Function):
    """Maps x_i -> g_i x_i / sqrt(mean x^2 + epsilon), the mean over all ranks; in float32 at least, rounded once.

    With n = x / sqrt(...) and the gradient d of the output, that of the input is (g d - n mean(g d n)) / sqrt(...).
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
        # The inputs in their own dtype, not the float32 results: those are cheap to compute again and take twice the
        # memory.
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
        # of this rank's heads; `_means` adds those of the other ranks
        products = [(w * n).sum((-2, -1), keepdim=True) for w, n in zip(weighed, normalised)]
        of_inputs = [
            ((w - n * mean) * root).to(x.dtype)
            for w, n, mean, root, x in zip(weighed, normalised, _means(products, inputs, ctx.tp), inverse_roots, inputs)
        ]
        # not summed over TP: each rank has the gradient of its own part of the weights
        of_gains = [(widened(d) * n).sum((0, 1)).flatten() for d, n in zip(gradients, normalised)]
        return *of_inputs, *of_gains, None, None


def _means(sums: list[Tensor], inputs: tuple[Tensor, ...], tp: dist.ProcessGroup) -> Tensor:
    """Turns sums over this rank's heads, [seq, batch, 1, 1] for each input, into means over those of all ranks, by one
    all-reduce over TP. Every rank has the same number of heads."""
    total = torch.stack(sums)  # [2, seq, batch, 1, 1]: queries and keys share the latency of one all-reduce
    # in place and outside of autograd, which cannot differentiate it: `backward` calls it itself
    if tp.size() > 1:
        dist.all_reduce(total, group=tp)
    widths = [x.shape[-2] * x.shape[-1] * tp.size() for x in inputs]
    return total / total.new_tensor(widths).view(-1, 1, 1, 1, 1)
