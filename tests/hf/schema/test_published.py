"""Files of published models, and what stands in them beside a family's own fields: a new family makes no old file
illegal, and a part that is switched off is no part."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from mtrain.arch.parameters import num_parameters
from mtrain.base.errors import DataError
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.registry import CHANGES_THE_FUNCTION, FAMILIES, READ_BY_ALL, family_of
from tests.hf.folders import CONFIGS, TOWERS, content_of

FILES = [json.loads(line) for line in Path(__file__).with_name("published.jsonl").read_text().splitlines()]
"""Published config.json, without those of images and of weights in other formats: name; where it was found, or memory
of the published file; billions of parameters of the text model by the model's card, or what refuses it; content."""
NAMES = [*CONFIGS, *TOWERS]
OFF: list[Any] = [0, 0.0, False, None, "", [], {}]
ALL_FIELDS = frozenset().union(CHANGES_THE_FUNCTION, *(family.names for family in FAMILIES.values()))
SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "mamba_num_heads")


def model_of(config: dict[str, Any]) -> Any:
    family = family_of(config)
    return family.model(family.as_held(config, ()))


@pytest.mark.parametrize("file", FILES, ids=[file["name"] for file in FILES])
def test_a_published_file_is_the_model_of_its_card(file: dict[str, Any]) -> None:
    if "refused" not in file:
        assert num_parameters(model_of(file["config"])) / 1e9 == pytest.approx(file["billions"], rel=0.01)
        return
    with pytest.raises(DataError) as refused:
        model_of(file["config"])
    assert file["refused"] in str(refused.value)


def test_every_family_has_a_published_file() -> None:
    read = {family_of(file["config"]).model_type for file in FILES if "refused" not in file}
    # Qwen3.5 is published with images, and so are Gemma 4 and the Mistral 3 models
    alone = {"qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "mistral3", "ministral3"}
    assert {family.model_type for family in FAMILIES.values()} - read == alone


def parts_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yields the parts of a config.json: name of the part, fields, and names of fields that its family does not read
    but others do."""
    for before, fields, own in family_of(config).parts(config):
        yield before.rstrip("."), fields, sorted(ALL_FIELDS - own - INERT - READ_BY_ALL)


def changed(config: dict[str, Any], part: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {**config, part: {**config[part], **changes}} if part else {**config, **changes}


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_another_family_that_is_off_changes_nothing(name: str) -> None:
    config, rng = content_of(name), random.Random(name)
    right = model_of(config)
    for part, _, others in parts_of(config):
        assert len(others) > 50
        for field, value in product(others, OFF):
            family_of(changed(config, part, {field: value}))  # which refuses what it does not know
        assert model_of(changed(config, part, {field: rng.choice(OFF) for field in others})) == right


@pytest.mark.parametrize("name", NAMES)
def test_transformers_does_not_read_fields_of_other_families(name: str) -> None:
    """So that it is right to let them be off: the same fields, each with a drawn value."""
    config, rng = content_of(name), random.Random(name)
    made = (CONFIGS | TOWERS)[name]()
    for own, (_, fields, others) in zip([made, made.get_text_config()], parts_of(config)):
        drawn = {field: rng.choice(OFF) for field in others}
        read, plain = (type(own)(**copy.deepcopy(each)).to_dict() for each in ({**fields, **drawn}, fields))
        assert {field: read[field] for field in plain if field not in drawn} == {
            field: value for field, value in plain.items() if field not in drawn
        }


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES.values() if each.tower is None], ids=lambda f: f.model_type
)
def test_a_part_of_another_family_is_refused(family: Family) -> None:
    name = next(name for name in CONFIGS if family_of(content_of(name)).architecture == family.architecture)
    config = content_of(name) | {"model_type": family.model_type}
    for size in set(SIZES) - family.names:
        with pytest.raises(DataError) as refused:
            model_of(config | {size: 4})
        assert f"{size}=4 is not supported in a {family.model_type} model" in str(refused.value)
    if "num_experts_per_tok" not in family.names:
        assert model_of(config | {"num_experts_per_tok": 8, "norm_topk_prob": True}) == model_of(config)
        with pytest.raises(DataError, match="num_experts_per_tok=8"):
            model_of(config | {"num_experts": 4, "num_experts_per_tok": 8})
    elif "n_group" not in family.names:
        assert model_of(config | {"n_group": 1, "topk_group": 1, "moe_layer_freq": 1}) == model_of(config)
        with pytest.raises(DataError, match="n_group=8"):
            model_of(config | {"n_group": 8, "topk_group": 4})


UNSUPPORTED = {
    "gemma4_text": "hidden_size_per_layer_input=256",
    "gemma4": "hidden_size_per_layer_input=256",
    "glm4_moe": "hidden_size=4096 is not a multiple of num_attention_heads=96",
}
"""Family whose defaults in transformers are a model that is not supported -> what refuses it."""


@pytest.mark.parametrize("key", FAMILIES)
def test_the_defaults_of_transformers_are_read(key: str) -> None:
    family = FAMILIES[key]
    texts = {} if family.tower is None else {"text_config": {"model_type": family.tower.text_type}}
    name = "deepseek_v3" if key == "kimi_k2" else family.model_type  # the same class
    written = transformers.CONFIG_MAPPING[name](**texts).to_json_string(use_diff=False)
    config = json.loads(written) | {"model_type": family.model_type}
    if key not in UNSUPPORTED:
        assert num_parameters(model_of(config)) > 0
        return
    with pytest.raises(DataError) as refused:
        model_of(config)
    assert UNSUPPORTED[key] in str(refused.value)


def test_what_a_family_leaves_unread_is_refused_in_no_other() -> None:
    """Fields of Nemotron-H's initial weights and kernels, found in many files that were written after it."""
    unread = {"rescale_prenorm_residual": True, "num_logits_to_keep": 1, "chunk_size": 128, "moe_intermediate_size": 9}
    for name in ("llama", "qwen3", "olmo3", "phi3"):
        assert model_of(content_of(name) | unread) == model_of(content_of(name))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen2-moe", "shared_expert_intermediate_size"),
        ("qwen3-next", "shared_expert_intermediate_size"),
        ("qwen3.5-moe", "shared_expert_intermediate_size"),
        ("deepseek", "n_shared_experts"),
        ("glm4-moe", "n_shared_experts"),
        ("nemotron-h", "moe_shared_expert_intermediate_size"),
    ],
)
def test_shared_experts_of_size_0_are_none(name: str, size: str) -> None:
    config = content_of(name) | {size: 0}
    family, model = family_of(config), model_of(config)
    assert model.experts.shared_ffn_hidden_size == 0
    assert not model.experts.shared_gate
    assert not [key for key in family.table(model).shapes if "shared" in key]
    assert family.config(model, config) == config
