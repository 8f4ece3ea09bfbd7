"""MiniMax-M2: sigmoid-routed experts in every layer, norms over whole queries and keys, partly rotated heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Field, Required, Rope, heads, lookup
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    NORMS,
    VOCABULARY,
    common,
    experts,
    has_experts,
    in_layer,
    router,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.values import needed_value

_TOP_K = "num_experts_per_tok"


@final
@dataclass(frozen=True)
class _SeveralExperts(Entry):
    """Number of chosen experts, whose scores are divided by their sum; ours are if there are several."""

    @property
    def names(self) -> tuple[str, ...]:
        return (_TOP_K,)

    @property
    def part(self) -> str:
        return "experts"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        top_k = needed_value(config, _TOP_K, int, 8)
        if top_k == 1:
            raise DataError(
                f"config.json: {_TOP_K}=1 is not supported, but 2 or more are needed: the weight of a single expert is "
                "1 in this family"
            )
        return {"experts.top_k": top_k}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {_TOP_K: lookup(model, "experts.top_k")}


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    (
        *common(),
        *ACTIVATION,
        *heads(groups=8, head_dim=128),
        Field("intermediate_size", "experts.ffn_hidden_size", 1536),
        Field("num_local_experts", "experts.num_experts", 256, alias="num_experts"),
        _SeveralExperts(),
        Constant("experts.score", "sigmoid"),
        Constant("experts.expert_bias", True),
        Constant("qk_norm", True),
        Constant("qk_norm_width", "full"),
        # what the published files say of the function, which transformers does not read
        Required("scoring_func", "sigmoid", "sigmoid", part="experts"),
        Required("use_routing_bias", True, True, part="experts"),
        Required("use_qk_norm", True, True),
        Required("qk_norm_type", "per_layer", "per_layer"),
        Required("shared_intermediate_size", 0, 0, (None,)),
        # noise on the input of router and experts, which transformers draws in training; this program has none
        Required("router_jitter_noise", 0.0, 0.0, (None,)),
        Rope(5e6, default_partial=1.0, rotary_size="rotary_dim"),
    ),
    (
        *VOCABULARY,
        *NORMS,
        *ATTENTION,
        router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        # float32 even in files of bf16 weights: it moves by small steps, which bf16 would round away
        replace(
            in_layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", "E").only(has_experts),
            keeps_dtype=True,
        ),
        # w1 gates, w3 is multiplied by it, w2 projects back
        *experts("block_sparse_moe", "mlp", gate="w1", up="w3", down="w2"),
    ),
)
