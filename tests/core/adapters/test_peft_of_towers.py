"""Adapters with a vision tower or its projector trained in full go to PEFT, merged and not, and come back."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.base.errors import DataError
from mtrain.config import Config
from mtrain.config.load import save_config
from mtrain.convert.adapters import export_adapter
from mtrain.convert.exporting import export_hf
from mtrain.hf.io.peft import PeftFolder, adapter_of
from mtrain.hf.schema.description import with_architecture
from mtrain.hf.schema.peft import freezes
from mtrain.hf.schema.registry import family_of_run
from mtrain.training.references import named_reference
from tests.messages import refuses
from tests.parity.batches import BATCH, SEQ
from tests.parity.compare import TOLERANCE, relative
from tests.parity.image_models import KINDS, Kind
from tests.parity.image_ranks import loss_after
from tests.parity.images import SQUARES, Picture, differentiated_batch, drawn, model_of
from tests.parity.models.test_images import PROJECTOR, TRAINED
from tests.pool import Pool

TOWER = {"freeze_tower": False}
LORA: dict[str, Any] = {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "fc1", "fc2"]}
NAMES: dict[Kind, tuple[list[str], list[str], list[str]]] = {
    "deepstack": (
        ["model.visual"],
        ["model.visual.merger", "model.visual.deepstack_merger_list.0", "model.visual.deepstack_merger_list.1"],
        ["model.visual.pos_embed", "model.visual.patch_embed", *(f"model.visual.blocks.{layer}" for layer in range(3))],
    ),
    "gemma3": (
        ["model.vision_tower", "model.multi_modal_projector"],
        ["model.multi_modal_projector"],
        ["model.vision_tower"],
    ),
}
NAMES["dense"] = (
    ["model.visual"],
    ["model.visual.merger"],
    [name for name in NAMES["deepstack"][2] if "2" not in name],
)
NAMES["mistral3"] = NAMES["gemma3"]
_OF_GEMMA4 = ["model.vision_tower.patch_embedder", "model.vision_tower.encoder"]  # without constants
NAMES["gemma4"] = ([*_OF_GEMMA4, "model.embed_vision"], ["model.embed_vision"], _OF_GEMMA4)
"""modules_to_save if both parts, the projector alone and the tower alone are trained."""
CASES: list[tuple[Kind, dict[str, bool], dict[str, Any], Layout]] = [
    ("dense", TRAINED, {"modules_to_save": ["norms"]}, Layout(tp=2, sp=True)),
    ("deepstack", PROJECTOR, {}, Layout()),
    ("deepstack", TOWER, {}, Layout()),
    ("gemma3", TRAINED, {}, Layout(dp=2, shard="weights")),
    ("mistral3", TOWER, {"base_dtype": "bf16"}, Layout()),
    ("gemma4", TRAINED, {"alpha": 100.0}, Layout()),
]


@cache
def batches(kind: Kind) -> list[Any]:
    pictures = SQUARES if kind == "gemma3" else [[Picture(3, 4, 4)], [Picture(3, 2, 4)], *[[]] * (BATCH - 2)]
    return [drawn(pictures, seed, (SEQ,), kind) for seed in (1, 2, 3)]


def run_of(folder: Path, run: Path, vision: dict[str, bool], adapter: dict[str, Any]) -> Config:
    content = {
        "run": {"dir": str(run)},
        "model": {"hf": str(folder), "vision": vision},
        "train": {"global_batch_size": BATCH, "micro_batch_size": BATCH // 2, "num_steps": 3, "precision": "fp32"},
        "optimizer": {"lr": 3e-2, "schedule": "constant"},
        "data": {"kind": "mock", "seq_length": SEQ},
        "adapter": LORA | adapter,
    }
    return Config.model_validate(with_architecture(content))


def theirs(kind: Kind, folder: Path, adapter: Path | None = None, is_rounded: bool = False) -> Any:
    """Opens a folder in float64, with an adapter; may round the matrices of the language model as a run does."""
    model = KINDS[kind][0].from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    if is_rounded:
        for name, each in model.named_parameters():
            if each.ndim > 1 and ("language_model" in name or "lm_head" in name):
                each.data = each.data.bfloat16().double()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


@pytest.mark.parametrize(
    ("kind", "vision", "adapter", "layout"),
    CASES,
    ids=[f"{kind}-{'-'.join(key.removeprefix('freeze_') for key in vision)}" for kind, vision, _, _ in CASES],
)
def test_a_trained_tower_goes_to_peft_merged_and_not_and_comes_back(
    kind: Kind, vision: dict[str, bool], adapter: dict[str, Any], layout: Layout, pool: Pool, tmp_path: Path
) -> None:
    copy.deepcopy(model_of(kind)).float().save_pretrained(tmp_path / "hf")
    config = run_of(tmp_path / "hf", tmp_path / "run", vision, adapter)
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run" / "config.yaml")
    *learned, last = batches(kind)
    ours = pool.run(loss_after, layout, config, learned, last, tmp_path / "run" / "checkpoints")[0]

    export_adapter(tmp_path / "run", tmp_path / "adapter", None)
    is_rounded = "base_dtype" in adapter
    opened = theirs(kind, tmp_path / "hf", tmp_path / "adapter", is_rounded)
    assert relative(ours, differentiated_batch(opened, last)) <= TOLERANCE
    frozen = differentiated_batch(theirs(kind, tmp_path / "hf", None, is_rounded), last)
    assert relative(ours, frozen) > 100 * TOLERANCE, "what is trained does something"
    export_hf(tmp_path / "run", tmp_path / "merged", None, None, num_workers=1)
    assert relative(ours, differentiated_batch(theirs(kind, tmp_path / "merged"), last)) <= TOLERANCE

    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    listed = [name for name in described["modules_to_save"] if "language_model" not in name]
    assert listed == NAMES[kind][[TRAINED, PROJECTOR, TOWER].index(vision)]
    again = run_of(tmp_path / "hf", tmp_path / "again", vision, adapter | {"path": str(tmp_path / "adapter")})
    assert relative(pool.run(loss_after, Layout(), again, [], last, None)[0], ours) <= TOLERANCE


def test_modules_that_peft_saved_are_the_parts_of_a_tower_or_refused(pool: Pool, tmp_path: Path) -> None:
    """PEFT finds modules by the ends of their paths."""
    copy.deepcopy(model_of("deepstack")).float().save_pretrained(tmp_path / "hf")
    plain = run_of(tmp_path / "hf", tmp_path / "run", {}, {})
    family = family_of_run(plain)
    names = {"projector": ["visual.merger", *NAMES["deepstack"][1][1:]], "all": ["visual"], "part": ["visual.merger"]}
    for name, modules in names.items():
        settings = peft.LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules=r"model\.language_model\..*(q_proj|gate_proj|up_proj|down_proj)",
            modules_to_save=modules,
            init_lora_weights=False,
        )
        model = peft.get_peft_model(theirs("deepstack", tmp_path / "hf"), settings)
        with torch.no_grad():
            for path, each in model.named_parameters():
                if "visual.modules_to_save" in path or "merger.modules_to_save" in path:
                    each.add_(0.1 * torch.randn_like(each))
        model.save_pretrained(tmp_path / name)
        names[name] = model
    described = {name: json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in names}
    found = {name: freezes(described[name], family, plain.model) for name in names}
    assert found["projector"] == {"freeze_tower": True, "freeze_projector": False}
    assert found["all"] == {"freeze_tower": False, "freeze_projector": False}
    assert adapter_of(tmp_path / "all", family, plain.model).modules_to_save == ()
    last = batches("deepstack")[-1]
    for name, layout in (("projector", Layout(tp=2, sp=True)), ("all", Layout())):
        user = run_of(tmp_path / "hf", tmp_path / "run", found[name], {"path": str(tmp_path / name)})
        ours = pool.run(loss_after, layout, user, [], last, None)[0]
        assert relative(ours, differentiated_batch(names[name], last)) <= TOLERANCE

    # as a reference of preferences, it is held by a run that trains the same parts
    folder = str(tmp_path / "projector")
    reference = named_reference(plain, folder)
    assert reference.config.model.vision is not None
    assert reference.config.model.vision.model_dump(include=set(found["all"])) == found["projector"]
    fits = [reference.fits(run_of(tmp_path / "hf", tmp_path / "run", found[name], {"path": folder})) for name in found]
    assert fits == [True, False, True], "a part of the projector is the projector"

    everywhere = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj", "qkv"]
    )
    peft.get_peft_model(theirs("deepstack", tmp_path / "hf"), everywhere).save_pretrained(tmp_path / "in-tower")
    refusals: list[tuple[str, dict[str, bool], tuple[str, ...]]] = [
        ("all", {}, ("needs model.vision.freeze_tower=false, model.vision.freeze_projector=false",)),
        ("projector", TRAINED, ("needs model.vision.freeze_tower=true",)),
        ("part", PROJECTOR, ("lacks model.visual.deepstack_merger_list.0.norm.weight and 11 more",)),
        ("in-tower", {}, ("vision tower", "visual.blocks.0.attn.qkv.lora_A", "merge_and_unload")),
    ]
    for name, vision, facts in refusals:
        user = run_of(tmp_path / "hf", tmp_path / "run", vision, {"path": str(tmp_path / name)})
        assert user.adapter is not None
        with refuses(DataError, *facts):
            PeftFolder(tmp_path / name, family, user.model, user.adapter)
