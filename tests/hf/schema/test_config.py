"""config.json -> model -> config.json: nothing is lost, in the style of any version."""

import json
from dataclasses import replace
from typing import Any

import pytest
import transformers

from mtrain.base.errors import DataError
from mtrain.config.load import load_config
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema import peft
from mtrain.hf.schema.config import differences
from mtrain.hf.schema.registry import FAMILIES, family_of, fitting_family
from tests.hf.folders import CONFIGS, TOWERS
from tests.messages import refuses
from tests.paths import CONFIGS as CONFIG_FILES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
OLD_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": [1, 2],
    "a_field_of_tomorrow": {"x": [1, None]},
}


@pytest.mark.parametrize("name", [*CONFIGS, *TOWERS])
def test_every_family_says_the_same_again_with_and_without_its_file(name: str) -> None:
    theirs = json.loads((CONFIGS | TOWERS)[name]().to_json_string(use_diff=False))
    family = family_of(theirs)
    model = family.model(family.as_held(theirs, ()))
    assert family.config(model, theirs) == theirs
    alone = family.config(model, None)
    assert family.model(family.as_held(alone, ())) == model
    read_by_transformers = transformers.AutoConfig.for_model(**alone)
    assert family.model(json.loads(read_by_transformers.to_json_string(use_diff=False))) == model
    assert fitting_family(model).config(model, None)


PUBLISHED: dict[str, dict[str, Any]] = {
    "ministral3_8b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "vision_config": {"hidden_size": 1024, "image_size": 1540, "model_type": "pixtral", "num_hidden_layers": 24},
        "vision_feature_layer": -1,
    },
    "qwen2_57b_a14b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 2560,
        "norm_topk_prob": False,
        "num_attention_heads": 28,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma3_4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "mistral_small_24b": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "gelu",
            "hidden_size": 1024,
            "image_size": 1540,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4.7_flash": {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "num_hidden_layers": 47,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "vocab_size": 154880,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
    "glm4.5_air": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "partial_rotary_factor": 0.5,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "mlp_intermediate_size": 8192,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
    "phi4_14b": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
}
"""Name in configs/model -> fields of the published config.json that describe the model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_model_under_configs(name: str) -> None:
    said = PUBLISHED[name]
    family = family_of(said)
    files = [CONFIG_FILES / axis / f"{each}.yaml" for axis, each in {"model": name, "run": "pretrain"}.items()]
    # published with a head, which counts beside images
    model = family.model(said if family.tower is None else family.as_held(said, ["language_model.lm_head.weight"]))
    assert differences(load_config(files, []).model, model) == []
    assert family.config(model, said) == said


def test_an_alias_has_every_entry_and_rule_of_its_family() -> None:
    assert replace(FAMILIES["kimi_k2"], model_type="deepseek_v3") == FAMILIES["deepseek_v3"]


def test_a_fused_projection_has_no_form_in_peft() -> None:
    model = FAMILIES["phi3"].model(json.loads(CONFIGS["phi3"]().to_json_string(use_diff=False)))
    for part in ("q_proj", "up_proj"):
        with refuses(DataError, part, "phi3"):
            list(peft.tensors(FAMILIES["phi3"], model, AdapterSection(kind="lora", rank=2, alpha=4, targets=[part])))
    alone = AdapterSection(kind="lora", rank=2, alpha=4, targets=["o_proj", "down_proj"])
    assert len(list(peft.tensors(FAMILIES["phi3"], model, alone))) == 2 * 2 * model.num_layers


def test_files_of_older_versions_keep_their_style() -> None:
    old = {**LLAMA, **OLD_ROPE}
    model = FAMILIES["llama"].model(old)
    rope = (model.rope.base, model.rope.scaling, model.rope.factor, model.rope.original_max_positions)
    assert rope == (500000.0, "llama3", 8.0, 8192)
    assert FAMILIES["llama"].config(model, old) == old
    longer = model.model_copy(update={"rope": model.rope.model_copy(update={"factor": 16.0})})
    written = FAMILIES["llama"].config(longer, old)
    assert written["rope_scaling"]["factor"] == 16.0
    assert "rope_parameters" not in written
    assert {**written, "rope_scaling": old["rope_scaling"]} == old
    assert FAMILIES["llama"].model(written) == longer


def test_gemma_with_one_base_of_each_kind_is_read() -> None:
    old = {
        **LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 13,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
    model = FAMILIES["gemma3_text"].model(old)
    assert (model.rope.base, model.rope.local_base, model.rope.factor) == (1e6, 1e4, 8.0)
    assert (model.sliding_window, model.global_attention_every, model.head_dim) == (512, 6, 256)
    assert FAMILIES["gemma3_text"].config(model, old) == old


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 5}, "hidden_size=64"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(changes: dict[str, Any], fact: str) -> None:
    config = {**LLAMA, **changes}
    with refuses(DataError, fact):
        family_of(config).model(config)


def test_a_family_that_cannot_describe_a_model_says_what() -> None:
    model = ModelSection(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, vocab_size=50, qk_norm=True
    )
    with refuses(DataError, "model.qk_norm=True"):
        FAMILIES["llama"].config(model, LLAMA)
    assert fitting_family(model).model_type == "qwen3"
    odd = model.model_copy(update={"norm": "layernorm"})
    with refuses(DataError):
        fitting_family(odd)
