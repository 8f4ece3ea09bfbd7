"""Runs of adapters are stopped and resumed like all others; the base is compared with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pool
from tests.verify.resume.test_run import gone_on, lively_config


@pytest.mark.parametrize("max_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_adapters_resume_bit_for_bit_and_on_another_layout(pool: Pool, tmp_path: Path, max_ranks: int) -> None:
    adapter = {"kind": "dora", "rank": 4, "targets": ["qkv", "fc2"]}
    check, _ = gone_on(pool, tmp_path, lively_config(adapter=adapter), "pp2", max_ranks)
    assert any("_adapter." in name for name in check.tensors)
    assert any("_adapter." not in name for name in check.tensors)
