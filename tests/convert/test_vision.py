"""A vision tower that belongs to the model: read from a folder or an import, trained or frozen, and exported."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.config.schema.model import ModelSection
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import verify_hf
from mtrain.hf.io.folder import HfFolder
from mtrain.hf.schema.description import described_model, with_architecture
from mtrain.hf.schema.registry import fitting_family
from tests.hf import hf_ranks
from tests.hf.folders import content_of, save
from tests.messages import refuses
from tests.parity import image_ranks
from tests.parity.batches import BATCH, SEQ
from tests.parity.image_models import KINDS, Kind
from tests.parity.images import MIXED, drawn, model_of
from tests.pool import Pool

TRAINED = {"freeze_tower": False, "freeze_projector": False}


def saved(kind: Kind, path: Path) -> Path:
    copy.deepcopy(model_of(kind)).bfloat16().save_pretrained(path, max_shard_size="60KB")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("dense", tmp_path_factory.mktemp("theirs") / "model")


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    content = HfFolder(folder)
    return {name: content.tensor(name).clone() for name in content.names()}


def run_of(run: Path, model: dict[str, Any], **sections: Any) -> Config:
    content = {
        "run": {"dir": str(run)},
        "model": model,
        "train": {"global_batch_size": BATCH, "micro_batch_size": BATCH // 2, "num_steps": 3, "precision": "bf16"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": SEQ},
        **sections,
    }
    return Config.model_validate(with_architecture(content))


def test_an_empty_section_takes_the_tower_of_the_folder(folder: Path, tmp_path: Path) -> None:
    config = run_of(tmp_path, {"hf": str(folder), "vision": {}})
    assert config.model.vision is not None
    described = json.loads((folder / "config.json").read_text())["vision_config"]
    assert config.model.vision.num_layers == described["depth"] == 2
    assert config.model.vision.rope_sections == (4, 2, 2)
    assert config.model.vision.is_frozen
    assert run_of(tmp_path, {"hf": str(folder)}).model.vision is None
    with refuses(ConfigError, "model.vision.hidden_size=32", "16"):
        run_of(tmp_path, {"hf": str(folder), "vision": {"hidden_size": 32}})


@pytest.mark.parametrize("freezes", [True, False], ids=["frozen", "trained, with a token ahead"])
def test_a_run_changes_what_it_trains(freezes: bool, folder: Path, pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = folder if freezes else saved("ahead", tmp_path / "ahead")
    config = run_of(run, {"hf": str(folder)} | ({"vision": {}} if freezes else {"vision": TRAINED, "mtp_depths": 1}))
    started = pool.run(hf_ranks.started_weights, Layout(), config)[0]
    before = state_of(folder)
    for name, value in before.items():
        if name.startswith("model.visual."):
            ours = started[f"vision.{name.removeprefix('model.visual.')}"]
            np.testing.assert_array_equal(ours, value.float().numpy(), err_msg=name)
    run.mkdir()
    save_config(config, run / "config.yaml")
    batches = [drawn(MIXED, 1), drawn(MIXED, 2)]
    pool.run(image_ranks.train_from_folder, Layout(tp=2, sp=True), config, batches, run / "checkpoints")
    proof = export_hf(run, tmp_path / "back", None, None, num_workers=1)
    after = state_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert proof.num_tensors == len(before)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    of_tower = {name for name in before if "visual" in name}
    assert changed - of_tower == before.keys() - of_tower
    assert changed & of_tower == (set() if freezes else of_tower)
    assert verify_hf(run, tmp_path / "back", num_workers=1) == proof
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["vision_config"]
        == (json.loads((folder / "config.json").read_text())["vision_config"])
    )
    transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in ("dense", "ahead experts")])
def test_an_import_with_the_tower_comes_back_byte_for_byte(kind: Kind, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path / "theirs")
    import_hf(folder, tmp_path / "ours", None, num_workers=1, depths=int(kind == "ahead"), with_vision=True)
    assert not (tmp_path / "ours" / "hf" / "carried.safetensors").exists()
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    for file in folder.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    verify_hf(tmp_path / "ours", folder, num_workers=1)


PUBLISHED = {"vision_tower.": "vision_tower.vision_model."}
IN_MEMORY = {
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
}


@pytest.mark.parametrize("names", [PUBLISHED, IN_MEMORY], ids=["published", "in memory"])
def test_a_tower_of_gemma_3_is_found_under_each_of_its_names(names: dict[str, str], tmp_path: Path) -> None:
    folder = saved("gemma3", tmp_path / "theirs")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        renamed = {}
        for name, value in tensors.items():
            prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
            renamed[names.get(prefix, "") + name.removeprefix(prefix)] = value
        save_file(renamed, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"] = {
        name: file.name for file in sorted(folder.glob("*.safetensors")) for name in load_file(file)
    }
    index.write_text(json.dumps(listed))
    import_hf(folder, tmp_path / "ours", None, num_workers=1, with_vision=True)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    assert {name: value.tolist() for name, value in state_of(tmp_path / "back").items()} == {
        name: value.tolist() for name, value in state_of(folder).items()
    }
    read = transformers.Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "back")
    for name, value in model_of("gemma3").named_parameters():
        assert torch.equal(dict(read.named_parameters())[name], value.bfloat16()), name


@pytest.mark.parametrize(
    ("changes", "outer", "facts"),
    [
        ({"vision_use_head": True}, {}, ("vision_use_head=True",)),
        ({"model_type": "clip_vision_model"}, {}, ("clip_vision_model", "siglip_vision_model")),
        ({"layer_norm_eps": 1e-5}, {}, ("layer_norm_eps=1e-05",)),
        ({"image_size": 25}, {}, ("image_size=25",)),
        ({}, {"mm_tokens_per_image": 16}, ("mm_tokens_per_image=16",)),
        ({}, {"mm_tokens_per_image": 8}, ("mm_tokens_per_image=8",)),
        ({}, {"image_token_index": 5000}, ("image_token=5000",)),
    ],
)
def test_a_tower_of_gemma_3_that_differs_is_refused(
    changes: dict[str, Any], outer: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    described = model_of("gemma3").config.to_dict()
    described["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(described | outer))
    assert described_model(tmp_path).vision is None, "text alone does not need it"
    with refuses(DataError, *facts):
        described_model(tmp_path, with_vision=True)


@pytest.mark.parametrize(
    ("changes", "text", "facts"),
    [
        ({"use_clipped_linears": True}, {}, ("use_clipped_linears=True",)),
        ({"head_dim": 4}, {}, ("head_dim=4", "num_attention_heads=8")),
        ({"num_key_value_heads": 1}, {}, ("num_key_value_heads=1", "num_attention_heads=2")),
        ({"rms_norm_eps": 1e-5}, {}, ("rms_norm_eps=1e-05",)),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5.0}}, {}, ("rope_parameters", "100.0")),
        ({}, {"use_bidirectional_attention": None}, ("use_bidirectional_attention=None", "vision")),
    ],
)
def test_a_tower_of_gemma_4_that_differs_is_refused(
    changes: dict[str, Any], text: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    described = json.loads(model_of("gemma4").config.to_json_string(use_diff=False))
    described["vision_config"] |= changes
    described["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert described_model(tmp_path).vision is None, "text alone does not need it"
    with refuses(DataError, *facts):
        described_model(tmp_path, with_vision=True)


def test_sound_of_gemma_4_is_copied_with_a_tower_that_is_read(tmp_path: Path) -> None:
    content = content_of("gemma4-images")
    content["text_config"]["use_bidirectional_attention"] = "vision"
    content["image_token_id"] = 50
    known = transformers.Gemma4VisionConfig().to_dict()
    content["vision_config"] = {name: value for name, value in content["vision_config"].items() if name in known}
    save("gemma4-images", tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(content))
    import_hf(tmp_path / "theirs", tmp_path / "ours", None, num_workers=1, with_vision=True)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    before, after = state_of(tmp_path / "theirs"), state_of(tmp_path / "back")
    assert any("audio_tower" in name for name in before)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"deepstack_visual_indexes": [1]}, ("deepstack_visual_indexes",)),
        ({"out_hidden_size": 16}, ("out_hidden_size=16", "32")),
        ({"model_type": "siglip"}, ("siglip",)),
        ({"patch_size": [4, 4]}, ("patch_size",)),
        ({"num_position_embeddings": 15}, ("num_positions=15",)),
        ({"window_size": 7}, ("window_size=7",)),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5.0}}, ("rope_parameters",)),
    ],
)
def test_a_tower_that_transformers_would_compute_otherwise_is_refused(
    changes: dict[str, Any], facts: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    described = json.loads((folder / "config.json").read_text())
    described["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert described_model(tmp_path).vision is None, "text alone does not need it"
    with refuses(DataError, *facts):
        described_model(tmp_path, with_vision=True)


def test_sections_that_do_not_fit_the_rotated_pairs_are_refused(folder: Path, tmp_path: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 1]
    (tmp_path / "config.json").write_text(json.dumps(described))
    with refuses(DataError, "rope_sections"):
        described_model(tmp_path, with_vision=True)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"projector_hidden_act": "silu"}, ("projector_hidden_act=", "gelu")),
        ({"vision_feature_layer": -2}, ("vision_feature_layer=-2", "-1")),
        ({"multimodal_projector_bias": True}, ("multimodal_projector_bias=True",)),
        ({"vision_config": {"rope_parameters": {"rope_type": "axial", "rope_theta": 5.0}}}, ("rope_parameters",)),
        ({"vision_config": {"rope_theta": 5.0}}, ("rope_theta=5.0",)),
        ({"vision_config": {"hidden_size": 12}}, ("hidden_size=12", "num_attention_heads=2")),
        ({"vision_config": {"window_size": 7}}, ("window_size=7",)),
        ({"vision_config": {"model_type": "siglip"}}, ("siglip", "pixtral")),
    ],
)
def test_a_tower_of_mistral_that_transformers_would_compute_otherwise_is_refused(
    changes: dict[str, Any], facts: tuple[str, ...], tmp_path: Path
) -> None:
    described = content_of("mistral3")
    vision = described["vision_config"] | changes.get("vision_config", {})
    for each in ({"vision_config": vision}, {"image_token_index": 50}):
        described |= each
    (tmp_path / "config.json").write_text(json.dumps(described))
    if changes.keys() == {"vision_config"}:
        with refuses(DataError, *facts):
            described_model(tmp_path, with_vision=True)
        return
    assert described_model(tmp_path, with_vision=True).vision is not None
    (tmp_path / "config.json").write_text(json.dumps(described | changes))
    with refuses(DataError, *facts):
        described_model(tmp_path, with_vision=True)


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen3"])
def test_a_model_whose_tower_cannot_be_trained_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content_of(name)))
    with refuses(DataError, "model.vision", str(content_of(name)["model_type"])):
        described_model(tmp_path, with_vision=True)


def test_a_new_model_with_a_tower_has_no_form_of_hugging_face(folder: Path) -> None:
    model = described_model(folder, with_vision=True)
    assert ModelSection.model_validate(model.model_dump(exclude_defaults=True)) == model
    with pytest.raises(DataError, match=r"qwen3_5_text lacks model\.vision"):
        fitting_family(model)
