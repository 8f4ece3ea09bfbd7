"""`mtrain verify hf` with images: transformers gets the pictures that its own processor has read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from mtrain.verify.core.result import HfReport
from mtrain.verify.hf import run_from_hf, verify_hf
from mtrain.verify.parity import Request
from tests.data.images.models import write_model, write_records
from tests.parity.image_models import Kind
from tests.verify.hf.waiting_ranks import run_with_fault_of_images
from tests.verify.planted.image_faults import ON_OWN_DATA

TRAINED = {"freeze_tower": False, "freeze_projector": False}


def configured(folder: Path, kind: Kind, vision: dict[str, bool], rates: dict[str, float], **data: Any) -> Config:
    """Writes a model and its data below the folder, and configures a run with them."""
    for name in ("hf", "data"):
        (folder / name).mkdir()
    hf = write_model(folder / "hf", kind)
    write_records(folder / "data")
    content = {
        "run": {"dir": str(folder / "run")},
        "model": {"hf": str(hf), "vision": vision},
        "train": {"global_batch_size": 3, "micro_batch_size": 1, "num_steps": 6, "device": "cpu"},
        "optimizer": {"lr": 1e-2, "schedule": "cosine", "clip_grad": 0.1, **rates},
        "data": {
            "kind": "sft",
            "seq_length": 80,
            "tokenizer": str(hf),
            "train": [{"path": str(folder / "data" / "a.jsonl")}],
            "cache_dir": str(folder / "cache"),
            **data,
        },
    }
    return Config.model_validate(with_architecture(content))


def report_of(pool: Any, config: Config, layouts: str, fault: str | None = None) -> HfReport:
    return verify_hf(config, Request(layouts, 2, 4, fault, "test"), lambda line: None, pool)


@pytest.mark.parametrize(
    ("kind", "vision", "data", "layouts"),
    [
        ("dense", TRAINED, {"packing": {"batch": "sequences"}}, "cp2"),
        # rows end before images that do not fit
        ("deepstack", {"freeze_projector": False}, {"seq_length": 40, "too_long": "split"}, "tp2sp"),
        ("mistral3", TRAINED, {"packing": {"batch": "sequences"}}, "cp2"),
        ("gemma3", {"freeze_projector": False}, {}, "pp2"),
        ("gemma4", TRAINED, {"seq_length": 256}, "cp2"),
    ],
    ids=["dense", "deepstack", "mistral3", "gemma3", "gemma4"],
)
def test_steps_with_images_are_those_of_transformers(
    pool: Any, tmp_path: Path, kind: Kind, vision: dict[str, bool], data: dict[str, Any], layouts: str
) -> None:
    rates = {"projector_lr": 4e-2}
    report = report_of(pool, configured(tmp_path, kind, vision, rates, **data), layouts)
    deviations = [(each.kind, each.step, each.value) for layout in report.layouts for each in layout.deviations]
    assert report.passed, deviations
    assert report.data == "the first batches of the run's own data, 4 of 6 samples with images"
    assert ("data.too_long: split -> end" in report.changes) == ("too_long" in data)


class _Faulty:
    """Pool whose ranks run with a fault of `ON_OWN_DATA`."""

    def __init__(self, pool: Any, fault: str) -> None:
        self._pool, self._fault, self.device = pool, fault, pool.device

    def run(self, function: object, layout: Layout, config: Config, num_steps: int, fault: None) -> list[Any]:
        """Runs a function like the pool of the suite."""
        assert function is run_from_hf
        found: list[Any] = self._pool.run(run_with_fault_of_images, layout, config, num_steps, self._fault)
        return found


FAULTS: list[tuple[Kind, str]] = [
    ("dense", "images-misplaced"),
    ("dense", "image-positions-on-one-axis"),
    ("gemma3", "images-misplaced"),
    ("gemma3", "patches-by-columns"),
    ("mistral3", "images-misplaced"),
    ("mistral3", "rows-of-features-reversed"),
    ("mistral3", "patches-by-columns"),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=["-".join(each) for each in FAULTS])
def test_faults_of_images_are_found(pool: Any, tmp_path: Path, kind: Kind, fault: str) -> None:
    """Plants faults of `ON_OWN_DATA` in all of mtrain's code, also where it could reach what transformers reads."""
    config, plant = configured(tmp_path, kind, {}, {}), ON_OWN_DATA.get(fault)
    sound = report_of(pool, config, "tp1")
    assert sound.passed
    with nullcontext() if plant is None else plant.planted():
        report = report_of(pool if plant is None else _Faulty(pool, fault), config, "tp1", None if plant else fault)
    assert report.diagnosis is not None
    assert report.diagnosis.kind == "log_prob"


def test_a_run_whose_batches_have_no_image_is_said_to_have_none(pool: Any, tmp_path: Path) -> None:
    config = configured(tmp_path, "dense", {}, {})
    text = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "data" / "a.jsonl").write_text(f"{json.dumps(text)}\n" * 3)
    report = report_of(pool, config, "tp1")
    assert report.passed
    assert report.data == "the first batches of the run's own data, none of 6 samples with images"
