"""Weights into which adapters are merged, by name."""

from __future__ import annotations

from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.convert.merged import Merging
from tests.config.samples import config
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


def test_a_tied_table_is_merged_with_nothing() -> None:
    merging(["qkv"], model__tied_embeddings=True)
    with refuses(ConfigError):
        merging(["qkv", "embedding"], model__tied_embeddings=True)
