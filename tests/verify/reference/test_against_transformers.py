"""Logits and gradients of the reference are those of transformers, for every family, in float64.

transformers computes norms, rotary angles and the softmax in float32 whatever the model's dtype; here its own code
runs with every mention of float32 read as float64, so that the comparison can be strict.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mtrain.config.megatron_fields import PROVEN
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection, RopeSection
from mtrain.verify.reference.model.modules import activated
from mtrain.verify.reference.model.shapes import EXPERT_BIAS
from tests.hf.megatron_names import from_huggingface
from tests.parity.families import GPT_OSS_ROPE
from tests.reference import logits_of, random_parameters

SMALL = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 61,
    "norm_epsilon": 1e-6,
}


class Float32IsFloat64(TorchFunctionMode):
    """Reads float32 as float64 wherever a torch function is given a dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        promoted = {key: _promoted(value) for key, value in (kwargs or {}).items()}
        return func(*(_promoted(value) for value in args), **promoted)


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def llama(rope: RopeSection, **parameters: Any) -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, rope=rope)
    return model, transformers.LlamaConfig(**common(model), rope_parameters=parameters | {"rope_theta": rope.base})


def common(model: ModelSection) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def llama3_rope() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=500.0, scaling="llama3", factor=8.0, original_max_positions=64)
    return llama(
        rope,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


def linear_rope() -> tuple[ModelSection, Any]:
    return llama(RopeSection(scaling="linear", factor=2.5), rope_type="linear", factor=2.5)


def yarn_rope() -> tuple[ModelSection, Any]:
    rope = RopeSection(
        base=300.0, scaling="yarn", factor=4.0, beta_fast=4.0, beta_slow=0.5, original_max_positions=32, truncate=False
    )
    return llama(
        rope,
        rope_type="yarn",
        factor=4.0,
        beta_fast=4.0,
        beta_slow=0.5,
        original_max_position_embeddings=32,
        truncate=False,
    )


def yarn_rope_rounded() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=50.0, scaling="yarn", factor=3.0, original_max_positions=2048, attention_factor=1.25)
    return llama(rope, rope_type="yarn", factor=3.0, original_max_position_embeddings=2048, attention_factor=1.25)


def qwen2() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qkv_bias=True, tied_embeddings=True, rope=RopeSection(base=1000000.0))
    rope_parameters = {"rope_type": "default", "rope_theta": 1000000.0}
    return model, transformers.Qwen2Config(**common(model), rope_parameters=rope_parameters)


def qwen3() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qk_norm=True, head_dim=16, rope=RopeSection(base=1000000.0))
    rope_parameters = {"rope_type": "default", "rope_theta": 1000000.0}
    return model, transformers.Qwen3Config(**common(model), head_dim=16, rope_parameters=rope_parameters)


def qwen3_with_global_layers() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, qk_norm=True, sliding_window=5, global_attention_every=2)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return model, transformers.Qwen3Config(
        **common(model),
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=True,
        sliding_window=5,
        layer_types=layer_types,
    )


def mistral() -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, sliding_window=7)
    rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return model, transformers.MistralConfig(**common(model), sliding_window=7, rope_parameters=rope_parameters)


def starcoder2(activation: str = "gelu_tanh") -> tuple[ModelSection, Any]:
    model = ModelSection(**SMALL, norm="layernorm", activation=activation, linear_bias=True, sliding_window=9)
    return model, transformers.Starcoder2Config(
        **{key: value for key, value in common(model).items() if key != "rms_norm_eps"},
        norm_epsilon=model.norm_epsilon,
        hidden_act={"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}[activation],
        use_bias=True,
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        embedding_dropout=0.0,
        residual_dropout=0.0,
        attention_dropout=0.0,
    )


def gemma3() -> tuple[ModelSection, Any]:
    rope = RopeSection(base=3000.0, local_base=100.0, scaling="linear", factor=4.0)
    model = ModelSection(
        **SMALL,
        zero_centered_norm=True,
        sandwich_norm=True,
        activation="geglu_tanh",
        qk_norm=True,
        head_dim=16,
        query_scalar=12.0,
        tied_embeddings=True,
        scale_embeddings=True,
        sliding_window=5,
        global_attention_every=3,
        rope=rope,
    )
    return model, transformers.Gemma3TextConfig(
        **common(model),
        head_dim=16,
        pad_token_id=None,  # the gradient of its row would be left out
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


def olmo2() -> tuple[ModelSection, Any]:
    """Some heads are grouped; the heads' sizes do not add up to the hidden size."""
    rope = RopeSection(base=500.0)
    model = ModelSection(**SMALL, post_norm=True, qk_norm=True, qk_norm_width="full", head_dim=16, rope=rope)
    rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    own = {"head_dim": 16, "pad_token_id": None}  # the gradient of a padding token's row would be left out
    return model, transformers.Olmo2Config(**common(model), **own, rope_parameters=rope_parameters)


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


def olmo3() -> tuple[ModelSection, Any]:
    rope = RopeSection(
        base=500.0, local_base=100.0, scaling="yarn", factor=4.0, beta_fast=4.0, original_max_positions=16
    )
    model = ModelSection(
        **SMALL,
        post_norm=True,
        qk_norm=True,
        qk_norm_width="full",
        sliding_window=5,
        global_attention_every=3,
        rope=rope,
    )
    return model, transformers.Olmo3Config(
        **common(model),
        pad_token_id=None,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


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


def starcoder2_exact_gelu() -> tuple[ModelSection, Any]:
    return starcoder2("gelu")


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


def qwen3_moe_unnormalised() -> tuple[ModelSection, Any]:
    return qwen3_moe(normalised=False)


def smollm3(pattern: int | list[int] = 2, **own: Any) -> tuple[ModelSection, Any]:
    """Every second layer has no rotary positions."""
    model = ModelSection(**SMALL, megatron={"no_rope_freq": pattern}, sliding_window=own.get("sliding_window"))
    kind = "full_attention" if model.sliding_window is None else "sliding_attention"
    return model, transformers.SmolLM3Config(
        **common(model),
        **{"no_rope_layer_interval": 2, "layer_types": [kind] * model.num_layers} | own,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def smollm3_marked() -> tuple[ModelSection, Any]:
    return smollm3([1, 0, 1], no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6)


FAMILIES = [
    deepseek_v3_experts,
    kimi_k2,
    glm4_moe_lite,
    deepseek_v2_experts,
    mixtral,
    qwen3_moe,
    qwen3_moe_unnormalised,
    smollm3,
    smollm3_marked,
    deepseek_v3,
    deepseek_v3_halves,
    deepseek_v3_direct_queries,
    deepseek_v2,
    llama3_rope,
    linear_rope,
    yarn_rope,
    yarn_rope_rounded,
    qwen2,
    qwen3,
    qwen3_with_global_layers,
    mistral,
    starcoder2,
    starcoder2_exact_gelu,
    gemma3,
    olmo2,
    olmo3,
    minimax,
    glm4_moe,
    gpt_oss,
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: Callable[[], tuple[ModelSection, Any]]) -> None:
    model, config = family()
    torch.manual_seed(7)
    tokens = torch.randint(model.vocab_size, (2, 40))
    with Float32IsFloat64():
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).double()
        for name, value in theirs.state_dict().items():
            torch.nn.init.normal_(value, std=0.3)
            assert value.dtype == torch.float64, name
        expected = theirs(tokens).logits
        F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters = from_huggingface(theirs.state_dict(), model)
    trained = {name: value.requires_grad_() for name, value in parameters.items() if not name.endswith(EXPERT_BIAS)}
    logits = logits_of(parameters, model, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)

    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected_gradients = from_huggingface(gradients, model)
    torch.testing.assert_close(
        {name: value.grad for name, value in trained.items()}, expected_gradients, rtol=1e-9, atol=1e-10
    )


def test_gates_beyond_their_bounds_are_those_of_transformers() -> None:
    """The models above have no gate beyond 7."""
    model, config = gpt_oss()
    gate, up = torch.linspace(-20, 20, 40).double().requires_grad_(), torch.linspace(15, -15, 40).double()
    theirs = GptOssExperts(config)._apply_gate(torch.stack([gate, up], dim=-1).flatten())
    ours = activated(model, torch.cat([gate, up]))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    (found,), (expected,) = (torch.autograd.grad(each.sum(), gate) for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_other_field_of_megatron_changes_the_function() -> None:
    known = {name for family in FAMILIES for name in family()[0].megatron}
    assert {name for name, field in PROVEN.items() if field.changes_the_function} == known


def test_parameters_of_another_model_are_refused() -> None:
    model = ModelSection(**SMALL)
    biased = model.model_copy(update={"qkv_bias": True})
    with pytest.raises(AssertionError, match=r"linear_qkv\.bias"):
        logits_of(random_parameters(model, seed=1), biased, torch.zeros(1, 3, dtype=torch.int64))
