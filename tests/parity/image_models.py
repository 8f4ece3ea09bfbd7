"""Small models of images in transformers: Qwen, Gemma and Mistral 3."""

from typing import Any, Literal

import transformers

from tests.parity import images_ahead
from tests.parity.batches import VOCAB

IMAGE, _VIDEO, START, END = 57, 58, 59, 60
PATCH, MERGE = 4, 2
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-2,  # norms of small outputs amplify rounding
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    # six of a head's eight pairs alternate, and the last two turn with time
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def dense_config() -> Any:
    return transformers.Qwen3_5Config(text_config=_TEXT, vision_config=_TOWER, **_IDS, attn_implementation="eager")


def experts_config() -> Any:
    text = {name: value for name, value in _TEXT.items() if name != "intermediate_size"} | _EXPERTS
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=_TOWER, **_IDS, attn_implementation="eager")
    config.text_config._experts_implementation = "eager"  # the grouped one does not support float64
    return config


_OF_NETS = ("linear_", "layer_types", "tie_word", "num_hidden_layers")
_ATTENTION = {name: value for name, value in _TEXT.items() if not name.startswith(_OF_NETS)}


def deepstack_config() -> Any:
    tower = _TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 2]}
    return transformers.Qwen3VLConfig(
        text_config=_ATTENTION | {"num_hidden_layers": 3},
        vision_config=tower,
        **_IDS,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )


def deepstack_experts_config() -> Any:
    routed = {name: value for name, value in _EXPERTS.items() if "shared" not in name}
    config = transformers.Qwen3VLMoeConfig(
        text_config=_ATTENTION | routed | {"num_hidden_layers": 2, "tie_word_embeddings": False},
        vision_config=_TOWER | {"deepstack_visual_indexes": [0]},
        **_IDS,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    config.text_config._experts_implementation = "eager"
    return config


def gemma3_config() -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,  # ends inside an image
        "layer_types": ["sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-2,
        "pad_token_id": None,  # whose embedding would have no gradient
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    }
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 6 * PATCH,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    # eager attention would round weights to float32
    return transformers.Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=9, **ids, attn_implementation="sdpa"
    )


def gemma4_config(**experts: Any) -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2 if experts else 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "global_head_dim": 12,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "sliding_window": 7,  # ends inside an image
        "layer_types": ["sliding_attention", "full_attention"] * (1 if experts else 2),
        "rms_norm_eps": 0.1 if experts else 1e-2,
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.34},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": PATCH,
        "pooling_kernel_size": MERGE,
        "position_embedding_size": 12,
        "standardize": True,
    }
    config = transformers.Gemma4Config(
        text_config=text | experts, vision_config=tower, image_token_id=IMAGE, attn_implementation="sdpa"
    )
    config.text_config._experts_implementation = "eager"
    return config


def gemma4_experts_config() -> Any:
    return gemma4_config(enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24)


def mistral3_config() -> Any:
    text = {name: value for name, value in _ATTENTION.items() if name != "rope_parameters"} | {
        "model_type": "ministral3",
        "pad_token_id": None,  # its row would have no gradient
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 7,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    }
    tower = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": PATCH,
    }
    return transformers.Mistral3Config(
        text_config=text,
        vision_config=tower,
        spatial_merge_size=MERGE,
        image_token_index=IMAGE,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )


Kind = Literal[
    "dense",
    "experts",
    "ahead",
    "ahead experts",
    "deepstack",
    "deepstack experts",
    "gemma3",
    "mistral3",
    "gemma4",
    "gemma4 experts",
]
"""Qwen3.5, Qwen3.5 with experts, both with a prediction further ahead, Qwen3-VL, Qwen3-VL with experts, Gemma 3,
Ministral 3, Gemma 4 without and with experts."""
WITH_AXES = ("dense", "experts", "ahead", "ahead experts", "deepstack", "deepstack experts")
"""Kinds whose images have positions on three axes, and patches of two frames."""
KINDS: dict[Kind, tuple[Any, Any]] = {
    "dense": (transformers.Qwen3_5ForConditionalGeneration, dense_config),
    "experts": (transformers.Qwen3_5MoeForConditionalGeneration, experts_config),
    "ahead": (images_ahead.of_class(transformers.Qwen3_5ForConditionalGeneration), dense_config),
    "ahead experts": (images_ahead.of_class(transformers.Qwen3_5MoeForConditionalGeneration), experts_config),
    "deepstack": (transformers.Qwen3VLForConditionalGeneration, deepstack_config),
    "deepstack experts": (transformers.Qwen3VLMoeForConditionalGeneration, deepstack_experts_config),
    "gemma3": (transformers.Gemma3ForConditionalGeneration, gemma3_config),
    "mistral3": (transformers.Mistral3ForConditionalGeneration, mistral3_config),
    "gemma4": (transformers.Gemma4ForConditionalGeneration, gemma4_config),
    "gemma4 experts": (transformers.Gemma4ForConditionalGeneration, gemma4_experts_config),
}
"""Classes of transformers, and their configurations."""
