"""Multi-head latent attention of plain megatron-core on its local layers, and ours, on ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from mtrain.config.schema.attention import LatentAttentionSection
from mtrain.config.schema.rope import RopeSection
from mtrain.core.layers.attention.mla import LatentAttention
from mtrain.core.ranks.groups import Groups

HIDDEN, HEADS, SEQ, ROWS = 16, 4, 8, 2
SIZES = LatentAttentionSection(q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=4)
ROPE = RopeSection(base=100.0, interleaved=True)

Gradients = dict[str, Any]
"""Gradients by name of the parameter, this rank's shards."""


class DotProductOfLatents(DotProductAttention):
    """Core attention that accepts and ignores the sizes that latent attention passes."""

    def __init__(self, k_channels: int | None = None, v_channels: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)


def error_of_plain(groups: Groups, has_te: bool) -> str:
    """Returns the error of building it; TransformerEngine is not installed.

    Args:
        groups: Process groups of the ranks.
        has_te: Whether the module believes that TransformerEngine is there, as it does by itself, or has been
            corrected.
    """
    assert multi_latent_attention.HAVE_TE or not has_te
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True).submodules.self_attention
    with mock.patch.object(multi_latent_attention, "HAVE_TE", has_te):
        if not has_te:
            return _type_error(groups, spec)
        spec.submodules.core_attention = DotProductOfLatents
        return _type_error(groups, spec)


def _type_error(groups: Groups, spec: Any) -> str:
    try:
        build_module(spec, config=_config(groups), layer_number=1, pg_collection=groups.collection)
    except TypeError as error:
        return str(error)
    raise AssertionError("it can be built")


def plain_gradients(groups: Groups, weights: Gradients, flag: bool) -> Gradients:
    """Returns the gradients of the plain module, repaired just enough to run.

    Args:
        groups: Process groups of the ranks.
        weights: Whole arrays by name.
        flag: Whether config.qk_layernorm says so when gradients are finalised. The latents are normalised in either
            case: the flag is on while the module is built, since 0.19.2 refuses norms without it.
    """
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True, qk_layernorm=True)
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = DotProductOfLatents
    config = _config(groups, qk_layernorm=True)
    with mock.patch.object(multi_latent_attention, "HAVE_TE", False):
        module = build_module(attention, config=config, layer_number=1, pg_collection=groups.collection)
        config.qk_layernorm = flag
        return _gradients(groups, module, weights, lambda hidden: module(hidden, None)[0])


def our_gradients(groups: Groups, weights: Gradients) -> Gradients:
    """Returns the gradients of our module."""
    module = LatentAttention(_config(groups), 1, AttnMaskType.causal, SIZES, ROPE, groups.collection)
    pairs = SIZES.qk_rope_head_dim // 2
    frequencies = ROPE.base ** (-torch.arange(pairs) / pairs)
    angles = torch.outer(torch.arange(SEQ), frequencies).repeat(1, 2).view(SEQ, 1, 1, -1)
    return _gradients(groups, module, weights, lambda hidden: module(hidden, None, rotary_pos_emb=angles)[0])


def _config(groups: Groups, **changes: Any) -> MLATransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "kv_channels": SIZES.v_head_dim,
        "q_lora_rank": SIZES.q_lora_rank,
        "kv_lora_rank": SIZES.kv_lora_rank,
        "qk_head_dim": SIZES.qk_nope_head_dim,
        "qk_pos_emb_head_dim": SIZES.qk_rope_head_dim,
        "v_head_dim": SIZES.v_head_dim,
        "rope_type": "rope",
        "rotary_base": ROPE.base,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": groups.layout.tp,
        "use_cpu_initialization": True,
    }
    return MLATransformerConfig(**{**fields, **changes})


def _gradients(groups: Groups, module: MegatronModule, weights: Gradients, run: Any) -> Gradients:
    """Returns the gradients of the sum of output x a fixed tensor, after megatron-core's own reduction."""
    for name, parameter in module.named_parameters():
        parameter.data.copy_(_shard(groups, torch.from_numpy(weights[name]), parameter))
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(module.config, settings, module, pg_collection=groups.collection)
    generator = torch.Generator().manual_seed(1)
    hidden, factor = (torch.randn(SEQ, ROWS, HIDDEN, generator=generator) for _ in range(2))
    (run(hidden) * factor).sum().backward()
    finalize_model_grads([wrapped], None, pg_collection=groups.collection)
    return {name: parameter.main_grad.numpy().copy() for name, parameter in module.named_parameters()}


def _shard(groups: Groups, whole: Tensor, parameter: Tensor) -> Tensor:
    for dim, size in enumerate(parameter.shape):
        if size != whole.shape[dim]:
            return whole.chunk(groups.layout.tp, dim)[groups.tp_rank]
    return whole
