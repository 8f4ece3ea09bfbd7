"""Runs that read images resume bit for bit, in the middle of an epoch, and to rounding on other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from mtrain.verify.core import shrink
from mtrain.verify.parity import Request
from mtrain.verify.resume.run import ResumeCheck, planned
from tests.data.images.models import write_model, write_records
from tests.verify.kept import KeptPool
from tests.verify.resume.faults import FaultyPool

NUM_RECORDS = 10
"""More than the four samples of each step before the stop, fewer than those of all steps."""


def configured(folder: Path, changes: dict[str, Any], **vision: bool) -> Config:
    for name in ("hf", "data"):
        (folder / name).mkdir()
    write_records(folder / "data", NUM_RECORDS)
    content = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": str(write_model(folder / "hf")), "vision": vision},
        "train": {"global_batch_size": 4, "micro_batch_size": 1, "num_steps": 6, "device": "cpu"},
        "optimizer": {"lr": 1e-2},
        "data": {
            "kind": "sft",
            "seq_length": 80,
            "tokenizer": str(folder / "hf"),
            "train": [{"path": str(folder / "data" / "a.jsonl")}],
            "cache_dir": str(folder / "cache"),
        },
        **changes,
    }
    return Config.model_validate(with_architecture(content))


@pytest.mark.parametrize("changes", [{}, {"adapter": {"rank": 2}}], ids=["all", "tower with adapters"])
def test_images_go_on_after_a_stop_in_an_epoch(
    changes: dict[str, Any], kept: KeptPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ids of the data are above the small model's, as those of every real model are
    monkeypatch.setattr(shrink, "_MAX_VOCAB", 64)
    monkeypatch.setattr(shrink, "FOLDED_VOCAB_SIZE", 61)
    user = configured(tmp_path, changes, freeze_tower=False, freeze_projector=False)
    plan = planned(user, Request("tp2sp", 3, 2, None, "", 2), 2)
    assert plan.base.config.data.prefetch_steps > 0, "threads read ahead of the step"
    assert plan.shrunk.reads_files
    assert plan.base.config.model.vocab_size == 61 < plan.samples.user_image_token
    pool: Any = FaultyPool(kept)
    check = ResumeCheck(plan, 2, tmp_path, pool)
    check.prepare()
    alike, other = check.on_same_layout(None), check.on_other_layout(plan.other_layouts[0], None)
    for result in (alike, other):
        assert result.passed, (result.error, result.first_failure())
    assert {each.value for each in alike.deviations} == {0.0}
    loaded = {each.kind for each in other.deviations if each.name == "vision.merger.linear_fc2.weight"}
    assert loaded == {"weights", "param", "exp_avg", "exp_avg_sq", "gradient", "update"}
    moved = [each for each in other.deviations if each.kind == "gradient" and each.name.startswith("vision.")]
    assert max(each.value for each in moved) > 0, "the tower has gradients"
    pool.fault = "samples-restarted"
    found = check.on_same_layout(None).first_failure()
    assert found is not None
    assert found.kind == "samples"
