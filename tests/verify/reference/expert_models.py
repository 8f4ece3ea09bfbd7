"""Models of transformers with experts or latent attention, small, each with our section of the same architecture."""

from collections.abc import Callable
from typing import Any

import transformers

from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.rope import RopeSection
from tests.parity.families import GPT_OSS_ROPE
from tests.verify.reference.dense_models import SMALL, common, gemma4


def minimax() -> tuple[ModelSection, Any]:
    """6 of a head's 16 dimensions rotate."""
    experts = {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24, "score": "sigmoid", "expert_bias": True}
    model = ModelSection(
        **SMALL | {"norm_epsilon": 1e-5},
        qk_norm=True,
        qk_norm_width="full",
        head_dim=16,
        rope=RopeSection(base=300.0, partial=0.375),
        experts=experts,
    )
    own = {"head_dim": 16, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3}
    rope = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.375}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return model, transformers.MiniMaxM2Config(**common(model) | own, **tokens, rope_parameters=rope)


def glm4_moe() -> tuple[ModelSection, Any]:
    """6 of a head's 12 dimensions rotate; the first layer is dense."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config = transformers.Glm4MoeConfig(
        **common(ModelSection(**SMALL)),
        head_dim=12,
        pad_token_id=None,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        moe_intermediate_size=24,
        n_shared_experts=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        rope_parameters=rope,
    )
    model = ModelSection(
        **SMALL,
        head_dim=12,
        qkv_bias=True,
        qk_norm=True,
        rope=RopeSection(base=500.0, partial=0.5),
        experts={
            "num_experts": 6,
            "top_k": 3,
            "ffn_hidden_size": 24,
            "shared_ffn_hidden_size": 48,
            "first_dense_layers": 1,
            "score": "sigmoid",
            "scaling_factor": 1.5,
            "expert_bias": True,
        },
    )
    return model, config


def gpt_oss() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=300.0, scaling="yarn", factor=4.0, beta_fast=4.0, original_max_positions=16, truncate=False)
    model = ModelSection(
        **SMALL,
        linear_bias=True,
        activation="swiglu_clamped",
        attention_sinks=True,
        head_dim=16,
        sliding_window=5,
        global_attention_every=2,
        rope=rope,
        experts=ExpertsSection(num_experts=6, top_k=2, ffn_hidden_size=48, router_bias=True),
    )
    return model, transformers.GptOssConfig(
        **common(model),
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters=GPT_OSS_ROPE,
    )


MLA: dict[str, Any] = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}


DEEPSEEK_YARN = RopeSection(
    base=50.0,
    scaling="yarn",
    factor=3.0,
    original_max_positions=16,
    beta_fast=4.0,
    mscale=0.7,
    mscale_all_dim=1.2,
    interleaved=True,
)


def deepseek(
    rope: RopeSection, config: Callable[..., Any], experts: ExpertsSection | None = None, **own: Any
) -> tuple[ModelSection, Any]:
    """Builds a model; `rms_norm_eps` is not read by the norms of the latents."""
    q_lora_rank = own.get("q_lora_rank")
    knobs = {**SMALL, "num_query_groups": None, "norm_epsilon": 1e-5, "experts": experts}
    model = ModelSection(**knobs, mla={**MLA, "q_lora_rank": q_lora_rank, "norm_epsilon": 1e-6}, rope=rope)
    yarn = {
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "beta_fast": rope.beta_fast,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    kind = yarn if rope.scaling == "yarn" else {"rope_type": "default"}
    return model, config(
        **common(model),
        kv_lora_rank=MLA["kv_lora_rank"],
        qk_nope_head_dim=MLA["qk_nope_head_dim"],
        qk_rope_head_dim=MLA["qk_rope_head_dim"],
        v_head_dim=MLA["v_head_dim"],
        first_k_dense_replace=model.num_layers if experts is None else experts.first_dense_layers,
        rope_parameters=kind | {"rope_theta": rope.base},
        **own,
    )


def deepseek_v3() -> tuple[ModelSection, Any]:
    return deepseek(DEEPSEEK_YARN, transformers.DeepseekV3Config, q_lora_rank=12, rope_interleave=True)


def deepseek_v3_halves() -> tuple[ModelSection, Any]:
    return deepseek(RopeSection(base=500.0), transformers.DeepseekV3Config, q_lora_rank=12, rope_interleave=False)


def deepseek_v3_direct_queries() -> tuple[ModelSection, Any]:
    rope = DEEPSEEK_YARN.model_copy(update={"interleaved": False})
    return deepseek(rope, transformers.DeepseekV3Config, q_lora_rank=None, rope_interleave=False)


def kimi_k2(config: Callable[..., Any] = transformers.DeepseekV3Config) -> tuple[ModelSection, Any]:
    """DeepSeek-V3 without groups of experts, whose dimensions are scaled from one on."""
    rope = DEEPSEEK_YARN.model_copy(update={"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0})
    sizes = {name: value for name, value in CHOICE.items() if "group" not in name}
    experts = ExpertsSection(**sizes, score="sigmoid", expert_bias=True)
    own = {"q_lora_rank": 12, **GROUPS, "n_group": 1, "topk_group": 1}
    return deepseek(rope, config, experts, **own)


def glm4_moe_lite() -> tuple[ModelSection, Any]:
    return kimi_k2(transformers.Glm4MoeLiteConfig)


def deepseek_v2() -> tuple[ModelSection, Any]:
    return deepseek(DEEPSEEK_YARN, transformers.DeepseekV2Config, q_lora_rank=None)


GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}


CHOICE: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 3,
    "ffn_hidden_size": 12,
    "shared_ffn_hidden_size": 24,
    "first_dense_layers": 1,
    "num_groups": 4,
    "group_top_k": 2,
    "scaling_factor": 2.5,
}


def deepseek_v3_experts() -> tuple[ModelSection, Any]:
    """Ranks a group by the sum of its two best scores, to which the bias of the choice is added."""
    experts = ExpertsSection(**CHOICE, score="sigmoid", group_score_top_k=2, expert_bias=True)
    own = {"q_lora_rank": 12, "rope_interleave": True, "norm_topk_prob": True, **GROUPS}
    return deepseek(DEEPSEEK_YARN, transformers.DeepseekV3Config, experts, **own)


def deepseek_v2_experts() -> tuple[ModelSection, Any]:
    """Ranks a group by its best probability."""
    experts = ExpertsSection(**CHOICE, pre_softmax=True, group_score_top_k=1)
    own = {"q_lora_rank": None, "topk_method": "group_limited_greedy", **GROUPS}
    return deepseek(DEEPSEEK_YARN, transformers.DeepseekV2Config, experts, **own)


def mixtral() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, experts=ExpertsSection(num_experts=6, top_k=2, ffn_hidden_size=48))
    sizes = {"num_local_experts": 6, "num_experts_per_tok": 2}
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return model, transformers.MixtralConfig(**common(model), **sizes, rope_parameters=rope_parameters)


def qwen3_moe(normalised: bool = True) -> tuple[ModelSection, Any]:
    experts = ExpertsSection(num_experts=6, top_k=3, ffn_hidden_size=24, every=2, pre_softmax=not normalised)
    model = ModelSection(**SMALL, qk_norm=True, head_dim=16, experts=experts)
    return model, transformers.Qwen3MoeConfig(
        **common(model),
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        norm_topk_prob=normalised,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def qwen2_moe() -> tuple[ModelSection, Any]:
    """A gate on the output of the shared experts."""
    sizes = {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 40}
    experts = ExpertsSection(**sizes, shared_gate=True, pre_softmax=True)
    model = ModelSection(**SMALL, qkv_bias=True, experts=experts)
    return model, transformers.Qwen2MoeConfig(
        **common(model),
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def qwen3_moe_unnormalised() -> tuple[ModelSection, Any]:
    return qwen3_moe(normalised=False)


def gemma4_experts() -> tuple[ModelSection, Any]:
    """Experts next to the network of each layer; both have norms of their own, and so has the router."""
    sizes = {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 48}
    fields = {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
    return gemma4(sizes | {"branch_norms": True}, enable_moe_block=True, **fields)
