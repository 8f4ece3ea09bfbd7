"""Folders of Hugging Face with random weights, in shapes that a careless conversion gets wrong."""

import json
import math
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from mtrain.config import Config
from mtrain.hf.schema.description import described_model

AWKWARD: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 32,  # equal to hidden_size: a transposed matrix has the same shape
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 57,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT: dict[str, Any] = {
    **{name: value for name, value in AWKWARD.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    # norms of small outputs amplify rounding: with 1e-6 and heads of 6 dimensions float32 of transformers is 2e-5 wrong
    "rms_norm_eps": 1e-2,
}
GEMMA4: dict[str, Any] = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**AWKWARD, rope_parameters=LLAMA3),
    "llama-biased": lambda: transformers.LlamaConfig(**AWKWARD, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: transformers.LlamaConfig(**{**AWKWARD, "tie_word_embeddings": True}),
    "mistral": lambda: transformers.MistralConfig(**{**AWKWARD, "num_key_value_heads": 2}, sliding_window=9),
    "ministral3": lambda: transformers.Ministral3Config(
        **{**AWKWARD, "num_key_value_heads": 2},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 7,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **{**AWKWARD, "head_dim": 8, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **{**AWKWARD, "num_key_value_heads": 4},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **{**AWKWARD, "num_key_value_heads": 2}, num_local_experts=3, num_experts_per_tok=2
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **{**AWKWARD, "num_key_value_heads": 2, "head_dim": 8},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **{**AWKWARD, "num_key_value_heads": 4},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "qwen3-moe-unnormalised": lambda: transformers.Qwen3MoeConfig(
        **AWKWARD, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=False
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **{**AWKWARD, "num_key_value_heads": 2},
        **DELTA_NET,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **{**AWKWARD, "num_key_value_heads": 2},
        **DELTA_NET,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: value for name, value in AWKWARD.items() if name != "intermediate_size"} | {"num_key_value_heads": 2},
        **DELTA_NET,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
    ),
    "deepseek": lambda: transformers.DeepseekV3Config(
        **LATENT,
        n_routed_experts=6,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=3,
        topk_group=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "deepseek-direct-queries": lambda: transformers.DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None},
        n_routed_experts=4,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(
        **LATENT,
        n_routed_experts=6,
        moe_intermediate_size=24,
        n_shared_experts=2,
        num_experts_per_tok=3,
        mlp_layer_types=["dense", "dense", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **{**AWKWARD, "num_key_value_heads": 2},
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=6,
        moe_intermediate_size=24,
        n_shared_experts=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**AWKWARD, "num_key_value_heads": 2, "tie_word_embeddings": True},
        **GEMMA4,
        final_logit_softcapping=5.0,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4-experts": lambda: transformers.Gemma4TextConfig(
        **{**AWKWARD, "num_key_value_heads": 2, "tie_word_embeddings": True},
        **GEMMA4,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=24,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **AWKWARD,
        query_pre_attn_scalar=24,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**AWKWARD, "num_key_value_heads": 2, "head_dim": 8},
        no_rope_layers=[1, 0, 1],
        rope_parameters={"rope_type": "default", "rope_theta": 5e6},
    ),
    "smollm3-windowed": lambda: transformers.SmolLM3Config(
        **{**AWKWARD, "num_hidden_layers": 4, "head_dim": 8, "tie_word_embeddings": True},
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{**AWKWARD, "num_key_value_heads": 2},
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 250000.0},
    ),
    "olmo2": lambda: transformers.Olmo2Config(**AWKWARD),
    "olmo2-grouped": lambda: transformers.Olmo2Config(
        **{**AWKWARD, "num_key_value_heads": 2, "tie_word_embeddings": True}, rope_parameters=LLAMA3
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **{**AWKWARD, "num_hidden_layers": 5, "num_key_value_heads": 2},
        sliding_window=5,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "minimax": lambda: transformers.MiniMaxM2Config(
        **{**AWKWARD, "num_key_value_heads": 2},
        num_local_experts=5,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.375},
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **{**AWKWARD, "num_hidden_layers": 5, "num_key_value_heads": 2},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        ssm_state_size=6,
        mamba_num_heads=4,
        mamba_head_dim=5,
        n_groups=2,
        conv_kernel=3,
        # above many steps
        time_step_min=0.7,
        chunk_size=5,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        layer_norm_epsilon=1e-2,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **AWKWARD, num_local_experts=3, num_experts_per_tok=2, sliding_window=6
    ),
}

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_STEADY = {"rms_norm_eps": 0.1}
"""Epsilon of norms in towers: with 1e-2, training in half precision finds a model whose float32 is 1e-5 wrong in a
token."""
_OF_KIMI = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_THREE_AXES = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_OF_QWEN: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
TOWERS: dict[str, Any] = {
    "gemma3-images": lambda: transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict() | {"tie_word_embeddings": True},
        vision_config=_VISION,
        mm_tokens_per_image=4,
        image_token_index=60,
    ),
    "gemma4-images": lambda: transformers.Gemma4Config(
        text_config=CONFIGS["gemma4-experts"]().to_dict() | _STEADY | {"pad_token_id": 0},
        vision_config={
            **_VISION,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 8,
            "standardize": True,
        },
        audio_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 2],
            "output_proj_dims": 12,
        },
        image_token_id=60,
        video_token_id=61,
        audio_token_id=62,
    ),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=CONFIGS["mistral"]().to_dict(),
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=60,
        tie_word_embeddings=False,
    ),
    "ministral3-images": lambda: transformers.Mistral3Config(
        text_config=CONFIGS["ministral3"]().to_dict(),
        vision_config=_VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=60,
        tie_word_embeddings=False,
    ),
    "kimi-k2.5": lambda: transformers.Kimi_K25Config(
        text_config=CONFIGS["deepseek"]().to_dict(),
        vision_config=_OF_KIMI,
        projection_hidden_size=16,
        image_token_id=60,
        video_token_id=59,
        vision_start_token_id=58,
        vision_end_token_id=57,
        tie_word_embeddings=False,
    ),
    "qwen3-vl-images": lambda: transformers.Qwen3VLConfig(
        text_config={
            **{name: value for name, value in AWKWARD.items() if name != "tie_word_embeddings"},
            "num_key_value_heads": 2,
            "rope_parameters": dict(_THREE_AXES),
        },
        vision_config=_OF_QWEN | {"depth": 2, "deepstack_visual_indexes": [1]},
        image_token_id=50,
        video_token_id=51,
        tie_word_embeddings=False,
    ),
    "qwen3-vl-moe-images": lambda: transformers.Qwen3VLMoeConfig(
        text_config={
            **AWKWARD,
            "num_key_value_heads": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "rope_parameters": dict(_THREE_AXES),
        },
        vision_config=_OF_QWEN | {"depth": 2, "deepstack_visual_indexes": [1]},
        image_token_id=50,
        video_token_id=51,
        tie_word_embeddings=False,
    ),
    "qwen3.5-images": lambda: transformers.Qwen3_5Config(
        text_config=CONFIGS["qwen3.5"]().to_dict() | _STEADY,
        vision_config=_OF_QWEN,
        image_token_id=50,
        video_token_id=51,
    ),
    "qwen3.5-moe-images": lambda: transformers.Qwen3_5MoeConfig(
        text_config=CONFIGS["qwen3.5-moe"]().to_dict() | _STEADY,
        vision_config=_OF_QWEN,
        image_token_id=50,
        video_token_id=51,
    ),
}
"""Models of text inside models of images and text."""


def content_of(name: str) -> dict[str, Any]:
    """Returns all fields of the config.json of a model, as transformers reads them."""
    text = (CONFIGS | TOWERS)[name]().to_json_string(use_diff=False)
    # its form of infinity, which JSON lacks
    found: dict[str, Any] = json.loads(text, object_hook=lambda each: math.inf if "__float__" in each else each)
    return found


def class_of(config: Any) -> Any:
    """Returns the class by which transformers opens a model."""
    is_text = not hasattr(config, "vision_config")
    return transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "30KB", **changes: Any
) -> Any:
    """Creates the model `name` with random weights in every tensor, saves it and returns it; `changes` are those of the
    config, or of its text."""
    torch.manual_seed(sum(map(ord, name)))
    config = (CONFIGS | TOWERS)[name]()
    config.get_text_config().update(changes)
    model = class_of(config).from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if name == "kimi-k2.5":
        _name_layers_as_published(folder)
    return model.eval()


def _name_layers_as_published(folder: Path) -> None:
    """Renames the layers of a text model that transformers 5.24 writes as "blocks", the name of those of images."""
    theirs, published = "language_model.model.blocks.", "language_model.model.layers."
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as content:
            metadata = content.metadata()
        state = {name.replace(theirs, published): value for name, value in load_file(file).items()}
        save_file(state, file, metadata)
    for file in folder.glob("*.index.json"):
        file.write_text(file.read_text().replace(theirs, published))


def run_of_folder(folder: Path, run: Path, num_steps: int, imported: Path | None = None) -> Config:
    """Makes the configuration of a run in bf16 from a folder's weights, or from what they were imported as."""
    model = described_model(folder).model_dump() | ({"hf": str(folder)} if imported is None else {})
    return Config.model_validate(
        {
            "run": {"dir": str(run)},
            "model": model,
            "checkpoint": {} if imported is None else {"initialize_from": str(imported)},
            "train": {"global_batch_size": 2, "num_steps": num_steps, "precision": "bf16"},
            "optimizer": {"lr": 1e-2, "schedule": "constant"},
            "data": {"kind": "mock", "seq_length": 8},
        }
    )
