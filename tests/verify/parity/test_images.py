"""Images match their definition under every kind of layout, also packed, and a frozen tower keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from tests.config.samples import config
from tests.config.test_vision import GEMMA3, GEMMA4, MISTRAL3, VISION, WIDE_HEADS
from tests.fault_table import Notice
from tests.verify.parity.checks import check

NET = {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8, "full_attention_every": 2}
TRAINED = {"freeze_tower": False, "freeze_projector": False}
TAUGHT: dict[str, Any] = {
    "loss__teacher": {"checkpoint": "not read here"},
    "loss__side_terms": {"kl": {"function": "distillation", "coefficient": 0.5}},
}
PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}


def with_images(vision: dict[str, Any], **changes: Any) -> Config:
    defaults: dict[str, Any] = {"model__num_layers": 2, "model__vision": VISION | vision}
    return config(**(defaults | changes))


@pytest.mark.parametrize(
    ("vision", "changes", "layouts"),
    [
        (
            {"deepstack": (0, 1)},
            {
                "data__isolate_documents": True,
                "model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16},
                "model__mtp_depths": 2,
                "train__recompute": "full",
            },
            "tp2spcp2mbs2,pp2dp2ep2mbs2",
        ),
        pytest.param(
            {}, PACKED | {"model__num_layers": 4, "model__mtp_depths": 2}, "pp2vpp2mbs1", marks=pytest.mark.nightly
        ),
        ({}, PACKED | TAUGHT | {"model__delta_net": NET}, "tp2spcp2mbs1"),
    ],
    ids=[
        "documents, with deeper features, experts and depths",
        "packed, interleaved",
        "packed, with delta nets and a teacher",
    ],
)
def test_images_are_exact(pool: Pool, vision: dict[str, Any], changes: dict[str, Any], layouts: str) -> None:
    report = check(pool, with_images(TRAINED | vision, **changes), layouts, num_steps=3)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert any(name.startswith("vision.blocks.") for name in report.tensors)
    assert "random images" in report.data


@pytest.mark.parametrize(
    ("vision", "changes", "layouts"),
    [
        (GEMMA3, PACKED, "tp2spcp2mbs1"),
        (GEMMA3, {}, "cp2ulyssesmbs2,pp2mbs2"),
        (GEMMA4 | {"standardize": True}, WIDE_HEADS | PACKED, "tp2spcp2mbs1"),
    ],
    ids=["packed", "whole rows", "gemma4"],
)
def test_images_whose_tokens_see_each_other_are_exact(
    pool: Pool, vision: dict[str, Any], changes: dict[str, Any], layouts: str
) -> None:
    windows = {"model__sliding_window": 7, "model__global_attention_every": 2}
    settings = config(model__num_layers=2, model__vision=vision | TRAINED, **windows | changes)
    report = check(pool, settings, layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert any(name.startswith("vision.vision_tower.") for name in report.tensors)


def test_images_of_mistral_3_are_exact(pool: Pool) -> None:
    settings = config(model__num_layers=2, model__vision=MISTRAL3 | TRAINED, model__sliding_window=7)
    report = check(pool, settings, "tp2spcp2mbs2", num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert any(name.startswith("vision.multi_modal_projector.") for name in report.tensors)


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        ({"model__vision": VISION | TRAINED, "adapter": {"rank": 3, "modules_to_save": ["norms"]}}, "tp2spcp2mbs2"),
        ({"model__vision": GEMMA3 | TRAINED, "optimizer__kind": "muon", "optimizer__tower_lr": 1e-3}, "tp2spdp2mbs2"),
        ({"model__vision": VISION | TRAINED, "optimizer__kind": "muon", "optimizer__projector_lr": 1e-3}, "pp2mbs2"),
    ],
    ids=["adapters", "muon, gemma 3", "muon, qwen"],
)
def test_a_tower_trains_with_adapters_and_by_muon(pool: Pool, changes: dict[str, Any], layouts: str) -> None:
    report = check(pool, config(model__num_layers=2, **changes), layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    updates = {each.name: each for each in report.layouts[0].deviations if each.kind == "update"}
    tower = [name for name in report.tensors if name.startswith("vision.")]
    assert tower
    assert all(updates[name].tolerance > 0 for name in tower), "every part of it learns"


SHARED, DATA, ALONE = "cp2mbs8", "dp2mbs4", "mbs4"
DEEP = {"deepstack": (0, 1)}
EXPECTED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "images-misplaced": (TRAINED, ALONE, "every layout", "loss"),
    "image-positions-on-one-axis": (TRAINED, ALONE, "every layout", "loss"),
    "features-of-the-next-place": (TRAINED, ALONE, "every layout", "loss"),
    "positions-by-time-alone": (TRAINED, ALONE, "every layout", "loss"),
    "tower-gradient-mean-over-sharing": (TRAINED, SHARED, "cp", "gradient"),
    "tower-gradient-of-one-rank": (TRAINED, "tp2mbs8,tp2spmbs8", "sp", "gradient"),
    "tower-gradient-mean-over-dp": (TRAINED, DATA, "dp", "gradient"),
    "ranks-without-images-dilute": (TRAINED, "mbs1,cp2mbs1", "cp", "gradient"),
    "places-counted-in-slices": (TRAINED, SHARED, "cp", "loss"),
    "images-cut-at-cp-border": (TRAINED, SHARED, "cp", "loss"),
    "deeper-features-dropped": (TRAINED | DEEP, ALONE, "every layout", "loss"),
    "frozen-weights-decayed": ({"freeze_projector": False}, ALONE, "every layout", "update"),
    "depths-read-the-table": (TRAINED, ALONE, "every layout", "loss"),
    "features-ahead-of-a-slice": (TRAINED, SHARED, "cp", "loss"),
    "features-ahead-without-gradient": (TRAINED, "pp2mbs8", "pp", "gradient"),
    "deeper-features-not-recomputed": (TRAINED | DEEP, ALONE, "every layout", "gradient"),
    "teacher-without-images": (TRAINED, ALONE, "every layout", "loss"),
}
"""Fault -> keys of model.vision, layouts, the axis and the kind of quantity that reveal it."""
DEPTHS: dict[str, Any] = {"model__mtp_depths": 2}
NEEDED: dict[str, dict[str, Any]] = {
    "depths-read-the-table": DEPTHS,
    "features-ahead-of-a-slice": DEPTHS,
    "features-ahead-without-gradient": DEPTHS,
    "deeper-features-not-recomputed": {"train__recompute": "full"},
    "teacher-without-images": TAUGHT,
}
"""Fault -> what the run needs besides a tower."""


@pytest.mark.fault(
    "numbers",
    "a changed trainer misplaces images, drops axes, deeper features or a rank's part, or averages over ranks",
    happens="`mtrain verify parity` names the axis and the first quantity that deviates, for each of seventeen faults",
    exit_code=1,
)
@pytest.mark.parametrize("fault", EXPECTED)
def test_every_fault_of_images_is_found(pool: Pool, fault: str, notice: Notice) -> None:
    vision, layouts, axis, kind = EXPECTED[fault]
    with notice:
        report = check(pool, with_images(vision, **NEEDED.get(fault, {})), layouts, fault, num_steps=1)
    assert notice.exit_code == int(not report.passed)
    assert [layout.error for layout in report.layouts if layout.error] == []
    assert report.diagnosis is not None
    assert (report.diagnosis.axis, report.diagnosis.kind) == (axis, kind)
    assert report.layouts[0].passed == (axis != "every layout")


@pytest.mark.parametrize(
    ("vision", "layouts", "trained"),
    [
        ({"freeze_projector": False}, "tp2spmbs4", ("vision.merger.", "decoder.", "embedding.", "output_layer.")),
        (TRAINED | {"freeze_language_model": True}, "pp2mbs4", ("vision.",)),
    ],
    ids=["tower", "language model"],
)
def test_a_frozen_part_keeps_its_bits(pool: Pool, vision: dict[str, Any], layouts: str, trained: tuple[str]) -> None:
    report = check(pool, with_images(vision), layouts, num_steps=2)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    frozen = {name for name in report.tensors if not name.startswith(trained)}
    assert frozen
    for layout in report.layouts:
        updates = {each.name: each for each in layout.deviations if each.kind == "update"}
        assert {(updates[name].value, updates[name].tolerance) for name in frozen} == {(0.0, 0.0)}
        assert not frozen & {each.name for each in layout.deviations if each.kind == "gradient"}
