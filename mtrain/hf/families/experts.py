"""Mixtral and Qwen3-MoE: the usual transformer with experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.config.model import ModelSection
from mtrain.hf.config import Entry, Field, Given, Needed, Rope, heads, lookup
from mtrain.hf.families.common import ACTIVATION, ATTENTION, NORMS, VOCABULARY, LayerWindows, common, experts, router
from mtrain.hf.family import Family


@final
@dataclass(frozen=True)
class _Renormalised(Entry):
    """Whether the weights of the chosen experts are divided by their sum.

    A softmax over the chosen ones is the same as a softmax over all whose chosen ones are divided by their sum.
    """

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"experts.pre_softmax": not config.get("norm_topk_prob", False)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {"norm_topk_prob": not lookup(model, "experts.pre_softmax")}


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8),
        Field("sliding_window", "sliding_window"),
        Field("intermediate_size", "experts.ffn_hidden_size"),
        Field("num_local_experts", "experts.num_experts", 8),
        Field("num_experts_per_tok", "experts.top_k", 2),
        Given("experts.pre_softmax", False),
        Rope(1e6),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("block_sparse_moe.gate.weight"),
        *experts("block_sparse_moe.experts", "w1", "w3", "w2"),
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
        _Renormalised(),
        Needed("attention_bias", False, False),
        Needed("decoder_sparse_step", 1, 1),
        Needed("mlp_only_layers", [], [], (None,)),
        Given("qk_norm", True),
        LayerWindows(first=0),
        Rope(),
    ),
    (*VOCABULARY, *NORMS, *ATTENTION, router("mlp.gate.weight"), *experts("mlp.experts")),
)
