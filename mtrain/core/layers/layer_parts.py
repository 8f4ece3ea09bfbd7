"""The modules of each part of a layer: the half of `mtrain/arch/features` that needs megatron-core.

Each part puts its modules into a draft of the layer, in the order of LAYER_PARTS, so later parts may change what
earlier ones have put there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from torch import Tensor

from mtrain.arch import features
from mtrain.arch.features import LAYER_PARTS, LayerPart
from mtrain.config.schema.model import ModelSection
from mtrain.core.layers.attention import full_width_norm
from mtrain.core.layers.attention.core_attention import CoreAttention
from mtrain.core.layers.attention.delta_net import GatedDeltaNet, first_log_decays
from mtrain.core.layers.attention.full_width_norm import FullWidthNormAttention
from mtrain.core.layers.attention.global_attention import GlobalAttention, NormedValueAttention
from mtrain.core.layers.attention.mamba import MambaMixer, first_step_biases
from mtrain.core.layers.attention.mla import LatentAttention
from mtrain.core.layers.attention.rotary import inverse_frequencies, latent_softmax_scale
from mtrain.core.layers.attention.rotating import RotatingAttention, TemperedAttention
from mtrain.core.layers.moe.layer import ExpertsLayer, experts_fields, experts_spec
from mtrain.core.layers.norm import OUTPUT_NORM_NAMES, Norm, OutputNormLayer, ScaledLayer
from mtrain.core.ranks.megatron import feed_forward_spec

Backend = Literal["torch", "te", "fla"]
"""Library of a layer's modules; fla: our modules with the delta rule of flash-linear-attention."""


@dataclass
class LayerDraft:
    """A layer while its parts are assembled."""

    module: type[TransformerLayer] = TransformerLayer
    input_norm: type[Norm | IdentityOp] = IdentityOp  # remains if the layer has no input norm
    feed_forward_norm: type[Norm | IdentityOp] = IdentityOp
    attention: ModuleSpec | None = None
    feed_forward: ModuleSpec | type[ExpertsLayer] | None = None
    checkpoint_names: dict[str, str] = field(default_factory=dict)
    """Replacements in checkpoints of prefixes of names inside the layer."""

    def spec(self) -> ModuleSpec:
        """Returns the spec of the layer; megatron-core skips a missing sublayer."""
        sublayers: dict[str, Any] = {}
        if self.attention is not None:
            sublayers |= {"self_attention": self.attention, "self_attn_bda": get_bias_dropout_add}
        if self.feed_forward is not None:
            sublayers |= {"mlp": self.feed_forward, "mlp_bda": get_bias_dropout_add}
        return ModuleSpec(
            module=self.module,
            submodules=TransformerLayerSubmodules(
                input_layernorm=self.input_norm,
                pre_mlp_layernorm=self.feed_forward_norm,
                # TransformerLayer renames by this map when it describes itself for checkpoints
                sharded_state_dict_keys_map=self.checkpoint_names,
                **sublayers,
            ),
        )


def _grouped_query_attention(draft: LayerDraft, model: ModelSection) -> None:
    draft.attention = ModuleSpec(
        module=RotatingAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            # bound here, since megatron-core passes only one softmax_scale, the same to every layer
            core_attention=partial(CoreAttention, windowed_scale=windowed_softmax_scale(model)),
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,  # `_qk_norm` may replace both
            k_layernorm=IdentityOp,
        ),
    )


def _global_attention(draft: LayerDraft, model: ModelSection) -> None:
    wide = model.with_global_heads()
    fields = {
        "kv_channels": wide.head_size,
        "num_query_groups": wide.query_groups,
        "softmax_scale": softmax_scale(wide),
    }
    norm = Norm if model.qk_norm else IdentityOp
    draft.attention = ModuleSpec(
        module=GlobalAttention,
        params={"attn_mask_type": AttnMaskType.causal, "fields": fields, "normalises_values": model.value_norm},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _value_norm(draft: LayerDraft, model: ModelSection) -> None:
    assert draft.attention is not None
    if draft.attention.module is RotatingAttention:  # GlobalAttention norms its values itself
        draft.attention.module = NormedValueAttention


def _qk_norm(draft: LayerDraft, model: ModelSection) -> None:
    assert draft.attention is not None
    draft.attention.submodules.q_layernorm = draft.attention.submodules.k_layernorm = Norm


def _full_width_qk_norm(draft: LayerDraft, model: ModelSection) -> None:
    assert draft.attention is not None
    # another class instead of q_layernorm, which megatron-core would apply to each head
    draft.attention.module = FullWidthNormAttention


def _attention_temperature(draft: LayerDraft, model: ModelSection) -> None:
    assert draft.attention is not None
    draft.attention.module = TemperedAttention


def _latent_attention(draft: LayerDraft, model: ModelSection) -> None:
    draft.attention = latent_attention_spec(model, LatentAttention)


def latent_attention_spec(model: ModelSection, module: type[LatentAttention]) -> ModuleSpec:
    """Builds the spec of latent attention with one of its classes."""
    latent = {"latent": model.mla, "rope": model.rope}
    return ModuleSpec(module=module, params={"attn_mask_type": AttnMaskType.causal, **latent})


def _latent_fields(model: ModelSection) -> dict[str, Any]:
    assert model.mla is not None
    return {"softmax_scale": latent_softmax_scale(model.mla, model.rope)}


def _delta_net(draft: LayerDraft, model: ModelSection) -> None:
    draft.attention = ModuleSpec(module=GatedDeltaNet, params={"delta_net": model.delta_net})


def _mamba(draft: LayerDraft, model: ModelSection) -> None:
    draft.attention = ModuleSpec(module=MambaMixer, params={"mamba": model.mamba})


def _hybrid_fields(model: ModelSection) -> dict[str, Any]:
    # checkpoints stack layers only if all are alike, which megatron-core checks only for experts
    return {"hetereogenous_dist_checkpoint": len(set(features.kinds(model))) > 1}


def _dense(draft: LayerDraft, model: ModelSection) -> None:
    projections = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    draft.feed_forward = feed_forward_spec(projections)


def _experts(draft: LayerDraft, model: ModelSection) -> None:
    assert model.experts is not None
    draft.feed_forward = experts_spec(model.experts)


class Modules(NamedTuple):
    """The modules of one part of a layer, and what else the part needs from megatron-core."""

    put_into: Callable[[LayerDraft, ModelSection], None] | None = None
    fields: Callable[[ModelSection], dict[str, Any]] | None = None
    """Fields of TransformerConfig for a model with the part in some layer."""
    first_values: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    """Functions from numbers uniform between 0 and 1 to initial values, by the end of a parameter's name."""
    draft: Mapping[str, Any] = MappingProxyType({})
    """Fields to set in the draft."""
    checkpoint_names: Mapping[str, str] = MappingProxyType({})
    own_name: str = ""
    """Norm that keeps its name in checkpoints, since TransformerEngine has no single projection to fuse it into."""


_ATTENTION_NORM_NAMES = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_FEED_FORWARD_NORM_NAMES = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
LATENT_NORM_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
FUSED_NAMES: Mapping[str, str] = {
    **_ATTENTION_NORM_NAMES,
    **_FEED_FORWARD_NORM_NAMES,
    **OUTPUT_NORM_NAMES,
    **LATENT_NORM_NAMES,
}
"""Names of our norms in checkpoints: those of TransformerEngine, which fuses norms into the projection after them, and
of Megatron-Bridge, where norms belong to the projection before them."""

MODULES: Mapping[type[LayerPart], Modules] = {
    features.AttentionResidual: Modules(),  # part of TransformerLayer
    features.FeedForwardResidual: Modules(),
    features.AttentionNorm: Modules(draft={"input_norm": Norm}, checkpoint_names=_ATTENTION_NORM_NAMES),
    features.FeedForwardNorm: Modules(draft={"feed_forward_norm": Norm}, checkpoint_names=_FEED_FORWARD_NORM_NAMES),
    features.OutputNorms: Modules(draft={"module": OutputNormLayer}, checkpoint_names=OUTPUT_NORM_NAMES),
    features.LayerScalar: Modules(draft={"module": ScaledLayer}),
    features.GroupedQueryAttention: Modules(
        _grouped_query_attention, lambda model: {"softmax_scale": softmax_scale(model)}
    ),
    features.GlobalAttention: Modules(_global_attention, _hybrid_fields, own_name="input_layernorm."),
    features.QkNorm: Modules(_qk_norm, lambda model: {"qk_layernorm": True}),
    features.FullWidthQkNorm: Modules(_full_width_qk_norm, checkpoint_names=full_width_norm.CHECKPOINT_NAMES),
    # an additional part of the projection, by which `RotatingAttention` multiplies the output
    features.AttentionGate: Modules(fields=lambda model: {"attention_output_gate": True}),
    features.AttentionTemperature: Modules(_attention_temperature),
    features.ValueNorm: Modules(_value_norm),
    # core attention builds sinks if this field is set
    features.AttentionSinks: Modules(fields=lambda model: {"softmax_type": "learnable"}),
    features.MultiHeadLatentAttention: Modules(
        _latent_attention, _latent_fields, checkpoint_names=LATENT_NORM_NAMES, own_name="input_layernorm."
    ),
    features.GatedDeltaNet: Modules(
        _delta_net, _hybrid_fields, {".A_log": first_log_decays}, own_name="input_layernorm."
    ),
    features.Mamba: Modules(_mamba, first_values={".dt_bias": first_step_biases}, own_name="input_layernorm."),
    features.DenseFeedForward: Modules(_dense),
    features.ExpertFeedForward: Modules(_experts, experts_fields, own_name="pre_mlp_layernorm."),
    features.BranchNorms: Modules(),  # part of ExpertsLayer
}
"""Modules of each of LAYER_PARTS; a test ensures that none is missing."""


def layer_spec(model: ModelSection, layer: int) -> ModuleSpec:
    """Builds the spec of layer `layer`, counted from 0, with our modules and megatron-core's parallel linears."""
    draft = LayerDraft()
    for part in LAYER_PARTS:
        modules = MODULES[type(part)]
        if not part.is_in(model, layer):
            continue
        for name, value in modules.draft.items():
            setattr(draft, name, value)
        if modules.put_into is not None:
            modules.put_into(draft, model)
        draft.checkpoint_names |= modules.checkpoint_names
        draft.checkpoint_names.pop(modules.own_name, None)
    return draft.spec()


def transformer_fields(model: ModelSection) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that the parts of the model's layers need."""
    fields = {} if model.layer_pattern is None else _hybrid_fields(model)
    for part in features.present(model):
        part_fields = MODULES[type(part)].fields
        fields |= {} if part_fields is None else part_fields(model)
    return fields


def softmax_scale(model: ModelSection) -> float:
    """Returns query_scalar ** -0.5, by default 1/sqrt(head_dim), times yarn's squared attention factor if whole heads
    rotate.

    yarn multiplies cos and sin, and hence queries and keys, by the factor, so scores contain it twice.
    """
    factor = 1.0 if _rotates_in_part(model) else inverse_frequencies(model.rope, model.rotary_size)[1]
    return factor**2 / _divisor(model)


def rotation_factor(model: ModelSection) -> float:
    """Returns the factor of cos and sin: yarn's attention factor, or 1 if `softmax_scale` contains it."""
    return inverse_frequencies(model.rope, model.rotary_size)[1] if _rotates_in_part(model) else 1.0


def _rotates_in_part(model: ModelSection) -> bool:
    """Says whether some dimensions of heads, or some layers, do not rotate."""
    is_in_part = model.rope.partial != 1 or bool(model.megatron.get("no_rope_freq"))
    return model.mla is None and is_in_part and model.rope.local_base is None


def windowed_softmax_scale(model: ModelSection) -> float:
    """Returns the softmax scale of layers with a window; yarn does not apply if they have another base."""
    return softmax_scale(model) if model.rope.local_base is None else 1.0 / _divisor(model)


def _divisor(model: ModelSection) -> float:
    return math.sqrt(model.head_size if model.query_scalar is None else model.query_scalar)
