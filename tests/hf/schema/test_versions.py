"""Two versions of transformers are in use, with different fields for one model: exports have both."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mtrain.base.errors import DataError
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.hf.schema.registry import FAMILIES, family_of
from tests.fault_table import Notice
from tests.hf import judges
from tests.hf.folders import CONFIGS, LLAMA3, TOWERS, content_of, save
from tests.messages import refuses

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "llama-biased": {"rope_theta": 1e4, "rope_scaling": None},
    "llama-tied": {"rope_theta": 1e4, "rope_scaling": None},
    "mistral": {"rope_theta": 1e4, "rope_scaling": None},
    "ministral3": {
        "rope_theta": 1e4,
        "rope_scaling": YARN
        | {"original_max_position_embeddings": 7, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
    "qwen2": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": YARN},
    "mixtral": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen2-moe": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3-moe": {"rope_theta": 1e4, "rope_scaling": None, "num_experts": 5},
    "qwen3-moe-unnormalised": {"rope_theta": 1e4, "rope_scaling": None, "num_experts": 4},
    "qwen3-next": {"rope_theta": 300.0, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "qwen3.5": {"rope_theta": 300.0, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "qwen3.5-moe": {"rope_theta": 300.0, "rope_scaling": None, "partial_rotary_factor": 0.25},
    "deepseek": {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek-direct-queries": {"rope_theta": 1e4, "rope_scaling": None},
    "glm4-moe-lite": {"rope_theta": 1e6, "rope_scaling": None},
    "gemma4": {},
    "gemma4-experts": {},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "smollm3": {"rope_theta": 5e6, "rope_scaling": None},
    "smollm3-windowed": {"rope_theta": 2e6, "rope_scaling": None},
    "phi3": {"rope_theta": 250000.0, "rope_scaling": None, "partial_rotary_factor": 1.0},
    "olmo2": {"rope_theta": 1e4, "rope_scaling": None},
    "olmo2-grouped": {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "llama3"} | {name: value for name, value in _LLAMA3.items() if name != "rope_type"},
    },
    "olmo3": {},  # two bases, which transformers 4 cannot express
    "glm4-moe": {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "minimax": {"rope_theta": 300.0, "rope_scaling": None, "partial_rotary_factor": 0.375},
    "nemotron-h": {},
    "gpt-oss": {"rope_theta": 150000, "rope_scaling": _GPT_OSS | {"original_max_position_embeddings": 4096}},
}
"""Fields that transformers 4.57 reads of each model and transformers 5.24 does not write."""


PARTIAL = ("glm4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe")
NOT_IN_4 = (
    "glm4-moe-lite",
    "kimi-k2.5",
    "minimax",
    "nemotron-h",
    "ministral3",
    "ministral3-images",
    *(name for name in [*CONFIGS, *TOWERS] if "qwen3.5" in name or "gemma4" in name),
)
"""Models of families that transformers 4 does not have."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_to_older_versions_what_it_says_to_newer_ones(name: str) -> None:
    config = content_of(name)
    family = family_of(config)
    said = family.for_all_versions(config)
    assert {field: value for field, value in said.items() if field not in config} == OLDER[name]
    assert config.items() <= said.items(), "a field was changed"
    assert family.for_all_versions(said) == said
    assert family.model(family.as_held(said, ())) == family.model(family.as_held(config, ()))
    again, alone = (transformers.AutoConfig.for_model(**each).to_dict() for each in (said, config))
    again.get("rope_parameters", {}).pop(
        "type", None
    )  # OLMo-2's word for rope_type, which transformers 5 keeps with its own
    assert again | dict.fromkeys(OLDER[name]) == alone | dict.fromkeys(OLDER[name])


def test_a_text_model_beside_images_says_it_in_its_own_part() -> None:
    config = json.loads(TOWERS["gemma3-images"]().to_json_string(use_diff=False))
    said = family_of(config).for_all_versions(config)
    assert said == config | {"text_config": config["text_config"] | OLDER["gemma3"]}


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    YARN,
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "truncate": False},
    _LLAMA3,
]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CONFIGS
        if CONFIGS[name]().model_type not in ("olmo3", "gemma3_text", "gemma4_text", "phi3", "ministral3")
    ],
)
def test_any_scaling_is_said_in_both_words(name: str) -> None:
    """Kinds of layers have scalings of their own, as in gemma3 and olmo3 above; phi3 and gemma4 have none, ministral3
    only yarn."""
    config = json.loads(CONFIGS[name]().to_json_string(use_diff=False))
    family = family_of(config)
    for scaling in ROPES:
        if name in PARTIAL and scaling["rope_type"] == "yarn":  # refused: a part of a head rotates
            continue
        changed = config | {"rope_parameters": {"rope_theta": 777.0, **scaling}}
        said = family.for_all_versions(changed)
        older = {field: value for field, value in said.items() if field != "rope_parameters"}
        if (name, scaling["rope_type"]) != (
            "gpt-oss",
            "default",
        ):  # transformers 5 takes its own default for null there
            assert family.model(family.as_held(older, ())) == family.model(family.as_held(changed, ()))
        assert family.model(family.as_held(said, ())) == family.model(family.as_held(changed, ()))


def test_an_export_that_is_no_copy_is_read_by_both_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy is the original folder, byte for byte (tests/convert/test_round_trips.py)."""
    save("qwen3", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", torch.float32, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    theirs, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back"))
    assert back == theirs | OLDER["qwen3"] | {"dtype": "float32", "torch_dtype": "float32"}
    # nothing is added to fields that both versions read, except the missing dtype, and none is changed
    older = {name: value for name, value in back.items() if name not in ("rope_parameters", "dtype")}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(older | {"torch_dtype": "bfloat16"}))
    import_hf(tmp_path / "hf", tmp_path / "older", torch.float32, num_workers=1)
    export_hf(tmp_path / "older", tmp_path / "again", None, None, num_workers=1)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == older | {"dtype": "float32"}
    assert "note:" not in capsys.readouterr().out


def test_what_older_versions_have_no_words_for_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("olmo3", tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", torch.float32, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    assert "transformers 4 cannot express the rotary embeddings of this olmo3 model" in capsys.readouterr().out


@pytest.mark.nightly  # by day the fields are compared with OLDER
def test_transformers_4_and_5_compute_the_same_of_every_export(transformers_4: list[Path], tmp_path: Path) -> None:
    # transformers 4 refuses any scaling of OLMo-2 but the linear one
    # it has other names in the vision tower that transformers 5 writes for Gemma 3
    # it reads transposed experts only, and the export of an import has them as its folder has
    left_out = "olmo3", "olmo2-grouped", "gemma3-images", "qwen3-vl-moe-images", *NOT_IN_4
    names = [name for name in [*CONFIGS, *TOWERS] if name not in left_out]
    for name in names:
        # with several groups transformers 4 sets the scores of others to 0, which is above a negative bias
        one_group: dict[str, Any] = {"n_group": 1, "topk_group": 1} if name == "deepseek" else {}
        save(name, tmp_path / name, **one_group)
        import_hf(tmp_path / name, tmp_path / f"{name}-ours", torch.float32, num_workers=1)
        export_hf(tmp_path / f"{name}-ours", tmp_path / f"{name}-back", None, None, num_workers=1)
    backs = [str(tmp_path / f"{name}-back") for name in names]
    command = [sys.executable, "-m", "tests.hf.judges", str(tmp_path / "4.pt"), *backs]
    subprocess.run(command, check=True, env=judges.environment_of_4(transformers_4))
    older = torch.load(tmp_path / "4.pt")
    assert older["version"].startswith("4.57.")
    for name, back in zip(names, backs, strict=True):
        expected, found = judges.answer(back), older["answers"][back]
        assert expected is not None, name
        assert found is not None, name
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=functools.partial("{}: {}".format, name))


OLD_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
OLD_OLMO = {**OLD_LLAMA, "model_type": "olmo3", "num_hidden_layers": 4, "rope_theta": 500000.0}
DISPUTED: dict[str, tuple[dict[str, Any], str]] = {
    "two scalings, one with more": (
        {**OLD_LLAMA, "rope_parameters": {"rope_theta": 1e4, **YARN, "beta_fast": 16.0}, "rope_scaling": YARN},
        "rope_scaling has beta_fast=None, but rope_parameters has beta_fast=16.0",
    ),
    "a base that one version leaves unread": (
        {**OLD_LLAMA, "rope_parameters": {"rope_theta": 1e6, **YARN}, "rope_scaling": YARN},
        "rope_parameters has rope_theta=1000000.0, but rope_scaling has rope_theta=10000.0",
    ),
    "a base inside of rope_scaling": (
        {**OLD_LLAMA, "rope_scaling": {**YARN, "rope_theta": 1e6}},
        "rope_scaling has rope_theta=1000000.0, but config.json has rope_theta=10000.0",
    ),
    "two names of the type": (
        {**OLD_LLAMA, "rope_scaling": {**YARN, "type": "linear"}},
        "the newer name has rope_type='yarn', but the older name `type` has rope_type='linear'",
    ),
    "an original length outside of rope_scaling": (
        {
            **OLD_LLAMA,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 32,
        },
        "original_max_position_embeddings=128, but config.json has original_max_position_embeddings=32",
    ),
    "truncation by kind of layer": (
        {**OLD_OLMO, "rope_scaling": {**YARN, "truncate": False}},
        "transformers 4 reads truncate=False in rope_scaling, but transformers 5",
    ),
    "no scaling where the family has one": (
        {**json.loads(CONFIGS["gpt-oss"]().to_json_string(use_diff=False)), "rope_parameters": None}
        | {"rope_theta": 150000.0, "rope_scaling": None},
        "rope_scaling=None without rope_parameters means no scaling in transformers 4, and rope_type=yarn in",
    ),
    "no base where the versions' defaults differ": (
        {name: value for name, value in OLD_OLMO.items() if name != "rope_theta"},
        "rope_theta and rope_parameters are missing",
    ),
}


@pytest.mark.fault(
    "folders",
    "a config.json that transformers 4 and transformers 5 read as two models",
    happens="refused; both readings are named",
    exit_code=3,
)
@pytest.mark.parametrize("case", DISPUTED)
def test_what_two_versions_read_differently_is_refused(case: str, notice: Notice) -> None:
    config, reported = DISPUTED[case]
    with notice, pytest.raises(DataError) as refused:
        family_of(config).model(config)
    assert reported in str(refused.value)
    assert refused.value.exit_code == notice.exit_code


def test_a_model_that_does_not_truncate_by_kind_of_layer_has_no_words() -> None:
    """transformers ignores `truncate` there, so an export would compute something else."""
    config = json.loads(CONFIGS["olmo3"]().to_json_string(use_diff=False))
    model = family_of(config).model(config)
    other = model.model_copy(update={"rope": model.rope.model_copy(update={"truncate": False})})
    with refuses(DataError, "model.rope.truncate=False"):
        FAMILIES["olmo3"].config(other, config)
