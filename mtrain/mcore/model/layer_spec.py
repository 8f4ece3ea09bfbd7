"""Layer specs: which module stands in each place of megatron-core's transformer."""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mtrain.base.errors import ConfigError
from mtrain.config.schema.model import ModelSection
from mtrain.mcore.model import sandwich_norm
from mtrain.mcore.model.attention.context_parallel import CoreAttention
from mtrain.mcore.model.attention.mla import LatentAttention
from mtrain.mcore.model.moe.layer_spec import experts_spec
from mtrain.mcore.model.norm import Norm

# Checkpoints carry TransformerEngine's names, where norms are fused into the projection behind them.
_TE_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    **sandwich_norm.CHECKPOINT_NAMES,
}
_STACKED_EXPERTS = "mlp.experts.experts."
"""In keys of tensors with an axis of all experts."""
_TE_LATENT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Of latent attention, in front of which the input norm stands alone."""


def global_name(key: str, places: tuple[int, ...]) -> str:
    """The name of a parameter in the whole model, the same for every layout and both backends.

    Args:
        key: Its checkpoint key: TransformerEngine's names, layers stacked without a number or spelled out.
        places: Its indices along the stacked axes: the layer, then the expert; empty where the key is complete.
    """
    key = canonical_name(key)
    if _STACKED_EXPERTS in key:
        key, places = key.replace(_STACKED_EXPERTS, f"mlp.experts.{places[-1]}."), places[:-1]
    return key.replace(".layers.", f".layers.{places[0]}.", 1) if places else key


def canonical_name(key: str) -> str:
    """A checkpoint key with norms named as the modules of the local spec."""
    for ours, theirs in (_TE_NAMES | _TE_LATENT_NAMES).items():
        key = key.replace(theirs, ours)
    return key


def has_transformer_engine() -> bool:
    """Whether TransformerEngine can be imported, by megatron-core's own finding."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def chosen_backend(model: ModelSection, isolate_documents: bool, device: torch.device) -> str:
    """`model.backend` with auto resolved: te where it is importable, a GPU is present and it can do the work.

    TransformerEngine cuts packed rows by document, ours by row, so isolated documents need the torch spec.

    Raises:
        ConfigError: te was asked for where it cannot run.
    """
    reasons = {
        "there is no GPU": device.type != "cuda",
        "transformer_engine cannot be imported": not has_transformer_engine(),
        "data.isolate_documents=true needs the torch backend": isolate_documents,
        "model.sandwich_norm=true needs the torch backend": model.sandwich_norm,
        "model.attention_sinks=true needs the torch backend": model.attention_sinks,
        "model.experts needs the torch backend": model.experts is not None,
        "model.mla needs the torch backend": model.mla is not None,
        "model.mtp_depths with model.global_attention_every needs the torch backend": model.mtp_depths > 0
        and model.global_attention_every is not None,
    }
    unmet = [reason for reason, holds in reasons.items() if holds]
    usable = not unmet
    if model.backend == "te" and not usable:
        raise ConfigError(f"model.backend=te cannot be used: {'; '.join(unmet)}; use model.backend=auto")
    if model.backend == "auto":
        return "te" if usable else "torch"
    return model.backend


def block_spec(model: ModelSection, backend: str, layers: range) -> TransformerBlockSubmodules | ModuleSpec:
    """The spec of a stage's transformer block.

    Args:
        model: The architecture.
        backend: torch or te.
        layers: Global numbers, from 0, of the layers that the stage holds.
    """
    if backend == "te":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(model, layer) for layer in layers], layer_norm=Norm)


def has_experts(model: ModelSection, layer: int) -> bool:
    """Whether layer `layer`, counted from 0, has a router and experts."""
    return model.experts is not None and model.experts.has_experts(layer)


def layer_spec(model: ModelSection, layer: int) -> ModuleSpec:
    """Layer `layer` on torch operations alone: our norms and core attention, megatron-core's parallel linears."""
    return ModuleSpec(
        module=sandwich_norm.SandwichLayer if model.sandwich_norm else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=attention_spec(model),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=feed_forward_spec(model, layer),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_checkpoint_names(model, layer),
        ),
    )


def _checkpoint_names(model: ModelSection, layer: int) -> dict[str, str]:
    """Ours -> TransformerEngine's. In front of experts, and of latent attention, norms are not fused there either."""
    names = _TE_NAMES | ({} if model.mla is None else _TE_LATENT_NAMES)
    alone = {"pre_mlp_layernorm.": has_experts(model, layer), "input_layernorm.": model.mla is not None}
    return {ours: theirs for ours, theirs in names.items() if not alone.get(ours)}


def attention_spec(model: ModelSection) -> ModuleSpec:
    """Grouped-query attention, or latent attention where the model has it."""
    if model.mla is not None:
        latent = {"latent": model.mla, "rope": model.rope}
        return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal, **latent})
    qk_norm = Norm if model.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def feed_forward_spec(model: ModelSection, layer: int) -> ModuleSpec:
    """The feed-forward part: dense, or experts."""
    if model.experts is not None and has_experts(model, layer):
        return experts_spec(model.experts)
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
