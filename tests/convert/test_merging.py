"""Weights into which adapters are merged, by name."""

from __future__ import annotations

from typing import Any

from mtrain.arch.adapters import is_matrix
from mtrain.base.errors import ConfigError
from mtrain.convert.merged import Merging
from tests.config.samples import config
from tests.config.test_vision import VISION
from tests.messages import refuses


def merging(targets: list[str], **changes: Any) -> Merging:
    run = config(adapter={"targets": targets}, **changes)
    assert run.adapter is not None
    return Merging(run, run.adapter)


def test_depths_of_multi_token_prediction_stay_as_they_are() -> None:
    found = merging(["q_proj", "fc2"], model__mtp_depths=1)
    linear = "self_attention.linear_qkv"
    own = [f"decoder.layers.1.{linear}_adapter.q_proj_lora_{kind}" for kind in "ab"]
    assert found.sources(f"decoder.layers.1.{linear}.weight") == own
    assert found.sources(f"mtp.layers.0.transformer_layer.{linear}.weight") == []
    assert found.sources("mtp.layers.0.eh_proj.weight") == []


def test_a_vision_tower_stays_as_it_is() -> None:
    """Modules of the tower have the names of layers of the language model, and are in the precision of the run."""
    found = merging(["fc1", "fc2"], model__vision=VISION)
    for name in ("vision.blocks.0.mlp.linear_fc1.weight", "vision.merger.linear_fc2.weight"):
        assert found.sources(name) == []
        assert not is_matrix(name, 2)
    assert is_matrix("decoder.layers.0.mlp.linear_fc1.weight", 2)


def test_a_tied_table_is_merged_with_nothing() -> None:
    merging(["qkv"], model__tied_embeddings=True)
    with refuses(ConfigError):
        merging(["qkv", "embedding"], model__tied_embeddings=True)
