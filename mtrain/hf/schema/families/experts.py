"""Mixtral, Qwen2-MoE and Qwen3-MoE: the usual transformer with experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    NORMS,
    VOCABULARY,
    LayerWindows,
    common,
    experts,
    has_shared_gate,
    in_layer,
    router,
    shared_experts,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.values import needed_value, value_of


@final
@dataclass(frozen=True)
class Renormalised(Entry):
    """Switch that divides the weights of chosen experts by their sum.

    A softmax over the chosen experts equals one over all experts, divided by the sum of the chosen.
    """

    is_default: bool = False
    """Value of the switch if the file has none."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("norm_topk_prob",)

    @property
    def part(self) -> str:
        return "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        # softmax before the choice leaves the weights of the chosen ones below 1; after it they add up to 1
        return {"experts.pre_softmax": not needed_value(config, "norm_topk_prob", bool, self.is_default)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"norm_topk_prob": not lookup(model, "experts.pre_softmax")}


@final
@dataclass(frozen=True)
class GatedShare(Entry):
    """Size of the shared experts, which have a gate; with size 0 there are none."""

    default: int
    """Size if the file does not say."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("shared_expert_intermediate_size",)

    @property
    def part(self) -> str:
        return "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        size = needed_value(config, "shared_expert_intermediate_size", int, self.default)
        return {"experts.shared_ffn_hidden_size": size, "experts.shared_gate": size > 0}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"shared_expert_intermediate_size": lookup(model, "experts.shared_ffn_hidden_size")}


@final
@dataclass(frozen=True)
class _Window(Entry):
    """A sliding window in all layers or none; the family reads no list of layers."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("use_sliding_window", "sliding_window")

    @property
    def part(self) -> str:
        return "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        window = value_of(config, "sliding_window", int, 4096)
        return {"sliding_window": window if needed_value(config, "use_sliding_window", bool, False) else None}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8),
        Field("sliding_window", "sliding_window"),
        Field("intermediate_size", "experts.ffn_hidden_size"),
        Field("num_local_experts", "experts.num_experts", 8, alias="num_experts"),
        Field("num_experts_per_tok", "experts.top_k", 2),
        Constant("experts.pre_softmax", False),
        # noise on the input of router and experts, which transformers draws in training; this program has none
        Required("router_jitter_noise", 0.0, 0.0, (None,)),
        Rope(1e6),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        # w1 gates, w3 is multiplied by it, w2 projects back
        *experts("block_sparse_moe", "mlp", gate="w1", up="w3", down="w2"),
    ),
)
# these two could make some layers dense, for which the families have no rules here
NO_DENSE_LAYERS = (
    Required("decoder_sparse_step", 1, 1, part="experts", is_off=True),
    Required("mlp_only_layers", [], [], (None,), part="experts"),
)
_SHARED = "mlp.shared_expert"
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=16),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 1408),
        GatedShare(5632),
        Field("num_experts", "experts.num_experts", 60),
        Field("num_experts_per_tok", "experts.top_k", 4),
        Renormalised(),
        Field("qkv_bias", "qkv_bias", True),
        *NO_DENSE_LAYERS,
        LayerWindows(alternates=True),
        Rope(),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("mlp.gate.weight"),
        *experts("mlp"),
        *shared_experts(_SHARED),
        in_layer("mlp.shared_experts.gate_weight", f"{_SHARED}_gate.weight", "o h").only(has_shared_gate),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=4),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", 768),
        Field("num_experts", "experts.num_experts", 128, alias="num_local_experts"),
        Field("num_experts_per_tok", "experts.top_k", 8),
        Renormalised(),
        Required("attention_bias", False, False),
        *NO_DENSE_LAYERS,
        Constant("qk_norm", True),
        _Window(),
        Rope(),
    ),
    (*VOCABULARY, *NORMS, *ATTENTION, router("mlp.gate.weight"), *experts("mlp")),
    # transformers' Qwen3MoeConfig has no such fields, so they cannot change anything
    inert=("max_window_layers", "use_qk_norm"),
)
