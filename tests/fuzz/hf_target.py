"""Folders of Hugging Face: config.json, index and headers, as `model.hf` and the import read them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from mtrain.base.tensor_slice import TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.hf.io.safetensors import header_of
from mtrain.hf.io.source import FolderTensors, open_source
from mtrain.hf.schema.description import described_model
from mtrain.hf.schema.files import CONFIG_NAME, INDEX_NAME
from mtrain.hf.schema.registry import FAMILIES, family_of
from tests.fuzz.mutations import TEXTS, mutated_bytes, mutated_tree
from tests.fuzz.target import Target

_BEFORE = "before.json"
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_DENSE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "torch_dtype": "bfloat16",
}
_LATENT: dict[str, Any] = {
    **{name: value for name, value in _DENSE.items() if name != "head_dim"},
    "num_key_value_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "moe_intermediate_size": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_DENSE,
        "rope_parameters": {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "mistral": {**_DENSE, "sliding_window": 9},
    "qwen2": {**_DENSE, "tie_word_embeddings": True},
    "qwen3": {**_DENSE, "rope_parameters": _YARN},
    "mixtral": {**_DENSE, "num_local_experts": 2, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_DENSE,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": _LATENT,
    "gemma3_text": {
        **_DENSE,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 6,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma4_text": {
        **_DENSE,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}},
        "final_logit_softcapping": 5.0,
        "enable_moe_block": True,
        "num_experts": 3,
        "top_k_experts": 2,
        "moe_intermediate_size": 6,
    },
    "gpt_oss": {
        **_DENSE,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}


@cache
def _tensors(name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    family = FAMILIES[name]
    table = family.table(family.model({"model_type": name, **_CONFIGS[name]}))
    return {tensor.name: (torch.bfloat16, tensor.shape) for tensor, _ in table.tensors()}


def _write(folder: Path, random: Random) -> None:
    name = random.choice(sorted(_CONFIGS))
    config = {"model_type": name, "architectures": [FAMILIES[name].architecture], **_CONFIGS[name]}
    places = {tensor: _SHARDS[number % 2] for number, tensor in enumerate(_tensors(name))}
    for shard in _SHARDS:
        header = header_of({one: facts for one, facts in _tensors(name).items() if places[one] == shard}, {})
        size = sum(2 * torch.Size(_tensors(name)[one][1]).numel() for one in places if places[one] == shard)
        (folder / shard).write_bytes(header + bytes(size))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    texts = {CONFIG_NAME: json.dumps(config).encode(), INDEX_NAME: json.dumps(index).encode()}
    (folder / _BEFORE).write_bytes(texts[CONFIG_NAME])
    match random.choice(("tree", "tree", "tree", "bytes", "index", "index", "names", "whole")):
        case "tree":
            texts[CONFIG_NAME] = json.dumps(mutated_tree(config, random)).encode()
        case "bytes":
            texts[CONFIG_NAME] = mutated_bytes(texts[CONFIG_NAME], random)
        case "index":
            changed = json.dumps(mutated_tree(index, random)).encode()
            texts[INDEX_NAME] = random.choice((changed, mutated_bytes(texts[INDEX_NAME], random)))
        case "names":
            places[random.choice(sorted(places))] = random.choice((*TEXTS, "../x", "a/b", "/etc/passwd", "x" * 5000))
            texts[INDEX_NAME] = json.dumps(index).encode()
        case "whole":
            pass
    for file, text in texts.items():
        (folder / file).write_bytes(text)


def _read(folder: Path) -> None:
    """Checks that both readers agree, that the model can be described again, and that every tensor has numbers."""
    source = open_source(folder)
    assert described_model(folder) == source.model
    family = family_of(source.folder.config)
    again = family.model(family.config(source.model, None))
    assert _meaning(again) == _meaning(source.model)
    tensors = FolderTensors(source)
    for key, facts in tensors.tensors.items():
        assert not tensors.read(key, TensorSlice.whole(facts.shape)).any()
    if _same_json(folder / CONFIG_NAME, folder / _BEFORE):
        assert source.model == family.model(json.loads((folder / _BEFORE).read_bytes()))


def _meaning(model: ModelSection) -> dict[str, Any]:
    """Returns the section, with values that follow from other fields spelled out."""
    return model.model_dump() | {"head_dim": model.head_size, "num_query_groups": model.query_groups}


def _same_json(one: Path, other: Path) -> bool:
    return bool(json.loads(one.read_bytes()) == json.loads(other.read_bytes()))


TARGET = Target(_write, _read, frozenset({3}))
