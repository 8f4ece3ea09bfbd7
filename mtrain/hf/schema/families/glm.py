"""GLM-4.5, 4.6 and 4.7: partly rotated heads, with DeepSeek-V3's experts and MTP."""

from __future__ import annotations

from typing import Any

from mtrain.hf.schema.config import Constant, Field, Required, Rope, heads
from mtrain.hf.schema.families.common import ACTIVATION, ATTENTION, FEED_FORWARD, NORMS, VOCABULARY, common
from mtrain.hf.schema.families.deepseek import (
    EXPERTS,
    DenseLayers,
    Depths,
    DividedScores,
    Groups,
    SharedExperts,
    ahead,
)
from mtrain.hf.schema.family import Family

_TOP_K, _EXPERT_SIZE = 8, 1408
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": _TOP_K}
_LAYER = (*NORMS, *ATTENTION, *FEED_FORWARD, *EXPERTS)

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *common(norm_epsilon=1e-5),
        *ACTIVATION,
        *heads(groups=8),
        # the output projection has no bias in this family
        Field("attention_bias", "qkv_bias", False),
        Field("use_qk_norm", "qk_norm", False),
        Field("n_routed_experts", "experts.num_experts", 128, alias="num_local_experts"),
        Field("num_experts_per_tok", "experts.top_k", _TOP_K),
        Field("moe_intermediate_size", "experts.ffn_hidden_size", _EXPERT_SIZE),
        SharedExperts(_EXPERT_SIZE),
        DenseLayers(1),
        Groups(_GROUPS),
        Field("routed_scaling_factor", "experts.scaling_factor", 1.0, without=1.0),
        Constant("experts.score", "sigmoid"),
        Constant("experts.expert_bias", True),
        Depths(),
        DividedScores(_TOP_K),
        Required("scoring_func", "sigmoid", "sigmoid", part="experts"),
        Required("topk_method", "noaux_tc", "noaux_tc", part="experts"),
        Rope(default_partial=0.5),
    ),
    (*VOCABULARY, *_LAYER, *ahead(_LAYER)),
)
