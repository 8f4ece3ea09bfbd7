"""A run with adapters begins as its frozen model, whatever the family, what is adapted, and where it starts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from mtrain.arch.layout import Layout
from mtrain.config import Config, adapters
from mtrain.config.schema.adapter import GROUPS, JOINED, LoraSection, Target
from mtrain.convert.importing import import_hf
from mtrain.hf.schema.description import described_model
from tests.core.adapters import first_ranks
from tests.core.adapters.adapter_ranks import Weights
from tests.hf.folders import save
from tests.hf.support import MODELS
from tests.pool import Pool

PARTS = [each for each in get_args(Target) if each not in GROUPS]
STARTS = ("random", "model.hf", "import")
TARGETS = ("all-linear", "single", "fused", "dora")


BY_NIGHT = (
    *("mistral", "mistral3", "ministral3", "mistral3/ministral3", "qwen2", "smollm3", "qwen3_moe", "olmo2"),
    *("kimi_k2", "kimi_k25", "glm4_moe_lite", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)
"""Families whose matrices are named as those of llama, qwen3, qwen2_moe, olmo3 and deepseek_v3, with or without a
tower. Every second of the others is by day; tests/hf/schema/test_all_linear.py has the matrices of all."""


def sections_of(config: Config) -> dict[str, dict[str, Any]]:
    """Returns adapters with every target that the model has, in as few as they need, since no part has two pairs."""
    found = []
    for part in PARTS:
        section = LoraSection(targets=(part,))
        if not [*adapters.broken_rules(config.model_copy(update={"adapter": section}), section)]:
            found.append(part)
    joined = {part for target in JOINED if target in found for part in JOINED[target]}
    single, fused = ([each for each in found if each not in without] for without in (JOINED, joined))
    dora = [each for each in single if each not in ("experts", "embedding", "output")]
    named: tuple[dict[str, Any], ...] = ({}, {"targets": single}, {"targets": fused}, {"targets": dora, "kind": "dora"})
    return dict(zip(TARGETS, ({"rank": 2, **each} for each in named), strict=True))


def run(folder: Path, start: str, adapter: Mapping[str, Any] | None) -> Config:
    model, checkpoint = described_model(folder / "hf").model_dump(), {}
    if start == "model.hf":
        model["hf"] = str(folder / "hf")
    elif start == "import":
        checkpoint["initialize_from"] = str(folder / "ours")
    return Config.model_validate(
        {
            "run": {"dir": str(folder / "run")},
            "model": model,
            "checkpoint": checkpoint,
            "adapter": adapter,
            "train": {"global_batch_size": 1, "num_steps": 1, "precision": "fp32", "device": "cpu"},
            "optimizer": {"lr": 1.0},
            "data": {"kind": "mock", "seq_length": 6},
        }
    )


def check_pairs(pairs: Weights) -> None:
    """Checks that of each pair one matrix is zero: B, but A of the table of embeddings."""
    for name in (each for each in pairs if each.endswith("lora_b")):
        zero, drawn = pairs[name], pairs[name.removesuffix("b") + "a"]
        if name.endswith(".embedding_lora_b"):
            zero, drawn = drawn, zero
        assert not zero.any(), name
        assert drawn.all(), name


def check_starts(pool: Pool, folder: Path, rows: list[tuple[str, str, str]]) -> None:
    """Starts runs and checks that each begins as its frozen model, that all starts of a family draw the same adapters,
    and so do further adapters on a base.

    Args:
        pool: Pool of ranks.
        folder: Folder for models.
        rows: Family, start and targets of each run.
    """
    configs = []
    for family, start, targets in rows:
        place = folder / family.replace("/", "-")
        if not place.exists():
            given = MODELS[family]
            save(given.folder, place / "hf", torch.float32, num_hidden_layers=4, **given.changes)
        if start == "import" and not (place / "ours").exists():
            import_hf(place / "hf", place / "ours", None, num_workers=1)
        configs.append(run(place, start, sections_of(run(place, "random", None))[targets]))
    drawn: Weights = {}
    for row, first in zip(rows, pool.run(first_ranks.first_values, Layout(), configs)[0], strict=True):
        assert any(name.endswith("lora_b") for name in first.adapters), row
        check_pairs(first.adapters)
        assert first.of_base.isfinite().all(), row
        assert torch.equal(first.logits, first.of_base), row
        for name, value in first.adapters.items():
            assert torch.equal(value, first.again[name]), (row, name)
            same = drawn.setdefault(f"{row[0]} {name}", value)
            assert "lora_" not in name or torch.equal(value, same), (row, name)


def test_a_run_begins_as_its_frozen_model(pool: Pool, tmp_path: Path) -> None:
    by_day = [each for each in MODELS if each not in BY_NIGHT][::2]
    starts = dict(zip(by_day, cycle(STARTS)))
    rows = [(family, start, "single") for family, start in starts.items()]
    others = [("random", "all-linear"), ("model.hf", "fused"), ("import", "dora")]
    check_starts(pool, tmp_path, rows + [("qwen3_next", *other) for other in others])


@pytest.mark.nightly
@pytest.mark.parametrize("family", MODELS)
def test_a_run_begins_as_its_frozen_model_whatever_the_targets(pool: Pool, tmp_path: Path, family: str) -> None:
    check_starts(pool, tmp_path, [(family, *each) for each in product(STARTS, TARGETS)])
