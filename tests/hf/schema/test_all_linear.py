"""`adapter.targets: all-linear` names the layers that PEFT's `target_modules="all-linear"` adapts in transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper

from mtrain.config import Config, adapters
from mtrain.hf.configuration import load_config
from mtrain.hf.schema.peft import path_in_model, tensors
from mtrain.hf.schema.registry import family_of_run
from tests.hf.folders import CONFIGS, TOWERS, save

LEFT_OUT = {
    "gate of shared experts": r".*\.mlp\.shared_expert_gate",
    "routers": r".*\.router\.proj",
    "out_proj of Mamba-2": r".*\.mixer\.out_proj",
}
"""Words of the note that a user reads -> linear layers that have no adapter here."""
HAVE_LEFT_OUT = {
    "qwen2-moe": "gate of shared experts",
    "qwen3-next": "gate of shared experts",
    "qwen3.5-moe": "gate of shared experts",
    "qwen3.5-moe-images": "gate of shared experts",
    "gemma4-experts": "routers",
    "gemma4-images": "routers",
    "nemotron-h": "out_proj of Mamba-2",
}
"""Every folder with such a layer."""
LOST = r".*\.(gate_proj|up_proj|down_proj)"
LOSE = ("qwen3-next", "deepseek", "deepseek-direct-queries", "glm4-moe", "glm4-moe-lite")
"""Folders whose layers LOST in dense parts and shared experts PEFT takes for the routed experts, and leaves bare."""
OF_EXPERTS = r".*\.mlp\.(gate|experts(\.base_layer)?)"
"""Parameters that PEFT adapts in some families in addition: routers, and the projections of routed experts."""


def run_of(hf: Path, adapter: str) -> Config:
    train = "{global_batch_size: 2, num_steps: 3}"
    data = "{kind: mock, seq_length: 8}"
    return load_config(
        [], [f"model.hf={hf}", f"adapter={adapter}", f"train={train}", f"data={data}", "optimizer.lr=0.1", "run.dir=x"]
    )


def of_text(names: Iterator[str], name: str) -> set[str]:
    """Returns what is not of images and sounds, which no run trains."""
    return {each for each in names if name not in TOWERS or ".language_model." in each}


def matching(names: set[str], pattern: str) -> set[str]:
    return {each for each in names if re.fullmatch(pattern, each)}


def of_peft(model: Any, name: str) -> tuple[set[str], set[str]]:
    """Returns the modules that PEFT adapts as linear layers, and those of which it adapts a parameter."""
    if name == "nemotron-h":
        with pytest.raises(ValueError, match="out_proj' is incompatible with Mamba"):
            peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
        settings = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["out_proj"])
    else:
        settings = peft.LoraConfig(r=2, target_modules="all-linear")
    adapted = peft.get_peft_model(model, settings)
    found = {each: module for each, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    are_parameters = {each for each, module in found.items() if isinstance(module, ParamWrapper)}
    short = "base_model.model."
    linear = of_text((each.removeprefix(short) for each in found.keys() - are_parameters), name)
    return linear, of_text((each.removeprefix(short) for each in are_parameters), name)


@pytest.mark.parametrize("name", [*CONFIGS, *TOWERS])
def test_all_linear_are_the_layers_that_peft_takes(tmp_path: Path, name: str) -> None:
    """What differs is named above, and each word of it in the note that the user reads."""
    model = save(name, tmp_path, torch.float32)
    config = run_of(tmp_path, "{}")
    assert config.adapter is not None
    ours = {path_in_model(each) for each in tensors(family_of_run(config), config.model, config.adapter)}

    output = model.get_output_embeddings()
    linear = {
        each for each, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not output
    }
    linear = of_text(iter(linear), name)
    patterns = [pattern for words, pattern in LEFT_OUT.items() if HAVE_LEFT_OUT.get(name) == words]
    left = {each for pattern in patterns for each in matching(linear, pattern)}
    assert bool(left) == (name in HAVE_LEFT_OUT)
    assert ours == linear - left

    theirs, parameters = of_peft(model, name)
    assert theirs - ours == (left if name != "nemotron-h" else set())
    lost = ours - theirs
    assert lost == (matching(ours, LOST) if name in LOSE else set())
    assert matching(parameters, OF_EXPERTS) == parameters

    notes = "".join(adapters.notes(config))
    assert bool(notes) == (bool(left) or config.model.experts is not None)
    assert HAVE_LEFT_OUT.get(name, "") in notes
    assert ("routed experts" in notes) == ("routers" in notes) == (config.model.experts is not None)
