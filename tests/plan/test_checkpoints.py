"""The planned size of checkpoints, compared with what ranks write, and their greatest number at one time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.preflight.disk import checkpoint_bytes, disk_need
from tests.config.samples import config
from tests.config.test_vision import VISION
from tests.core.adapters import adapter_ranks
from tests.core.state import checkpoint_ranks
from tests.pool import Pool

PROJECTOR_ALONE = {"freeze_projector": False, "freeze_language_model": True}
WIDE_TOWER = VISION | {"hidden_size": 256, "ffn_hidden_size": 512, "rope_sections": (8, 4, 4)}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 96}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "fp32": (Layout(), {"train__precision": "fp32"}),
    "not distributed": (Layout(), {"train__precision": "fp32", "train__distributed_optimizer": False}),
    "bf16 over tp and pp": (Layout(tp=2, pp=2), {"layout": {"tp": 2, "pp": 2}, "model__tied_embeddings": True}),
    "muon": (Layout(dp=2), {"optimizer": {"kind": "muon", "lr": 1e-3}}),
    "a frozen language model": (Layout(pp=2), {"layout__pp": 2, "model__vision": WIDE_TOWER | PROJECTOR_ALONE}),
    "experts": (Layout(dp=2, ep=2), {"model__experts": EXPERTS, "layout": {"ep": 2}, "model__num_layers": 4}),
}


def size_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_as_large_as_the_plan_says(name: str, pool: Pool, tmp_path: Path) -> None:
    layout, changes = CASES[name]
    sizes = {"model__hidden_size": 256, "model__ffn_hidden_size": 512, "model__num_layers": 2}
    given = config(**(sizes | changes))
    pool.run(checkpoint_ranks.save, layout, given, tmp_path, [1])
    found = size_below(tmp_path)
    assert checkpoint_bytes(given) == pytest.approx(found, rel=0.02)


def test_adapters_are_saved_alone(pool: Pool, tmp_path: Path) -> None:
    given = config(model__hidden_size=256, adapter={"kind": "lora", "rank": 64}, model__num_layers=4)
    pool.run(adapter_ranks.save, Layout(), given, tmp_path)
    found = size_below(tmp_path)
    assert checkpoint_bytes(given) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "checkpoints", "exports"),
    [
        ({}, 1, 0),
        ({"at_end": False}, 0, 0),
        ({"interval_steps": 10}, 3, 0),
        ({"interval_steps": 30}, 3, 0),
        ({"interval_steps": 60}, 2, 0),
        ({"interval_steps": 10, "keep_last": 1}, 2, 0),
        ({"interval_steps": 10, "keep_every_steps": 20, "keep_best": 1}, 9, 0),
        ({"interval_steps": 10, "export_hf_every_steps": 20}, 3, 5),
    ],
)
def test_no_more_checkpoints_are_counted_than_there_will_be(
    changes: dict[str, Any], checkpoints: int, exports: int
) -> None:
    need = disk_need(config(checkpoint=changes, train__num_steps=100))
    assert (need.num_checkpoints, need.num_exports) == (checkpoints, exports)
    assert need.total_bytes == checkpoints * need.checkpoint_bytes + exports * need.export_bytes
