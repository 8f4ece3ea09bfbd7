"""config.json -> model -> config.json: nothing is lost, in the style of any version."""

import json
from dataclasses import replace
from typing import Any

import pytest
import transformers

from mtrain.base.errors import DataError
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection
from mtrain.hf.configuration import load_config
from mtrain.hf.schema import peft
from mtrain.hf.schema.config import differences
from mtrain.hf.schema.registry import FAMILIES, family_of, fitting_family
from tests.hf.folders import CONFIGS, TOWERS, content_of
from tests.hf.schema.published import PUBLISHED
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_model_under_configs(name: str) -> None:
    said = PUBLISHED[name]
    family = family_of(said)
    files = [CONFIG_FILES / axis / f"{each}.yaml" for axis, each in {"model": name, "run": "pretrain"}.items()]
    model = family.model(family.as_held(said, None))  # of the file alone, before weights are downloaded
    if family.tower is not None:  # published with a head, which counts beside images
        assert family.model(family.as_held(said, ["language_model.lm_head.weight"])) == model
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


@pytest.mark.parametrize("target", ["out_proj", "experts"])
def test_parts_of_nemotron_have_no_form_in_peft(target: str) -> None:
    family = FAMILIES["nemotron_h"]
    model = family.model(content_of("nemotron-h"))
    with refuses(DataError, target, "nemotron_h"):
        list(peft.tensors(family, model, AdapterSection(kind="lora", rank=2, alpha=4, targets=[target])))


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
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 5}, "hidden_size=64"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
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
