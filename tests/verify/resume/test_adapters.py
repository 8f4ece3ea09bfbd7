"""Runs of adapters are stopped, killed and resumed like all others; the base is compared with them."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.verify.resume.test_run import lively_config, resumed


@pytest.mark.parametrize("max_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_adapters_resume_bit_for_bit_and_on_another_layout(pool: Pool, max_ranks: int) -> None:
    adapter = {"kind": "dora", "rank": 4, "targets": ["qkv", "fc2"]}
    report = resumed(pool, lively_config(adapter=adapter), "pp2", max_ranks)
    assert report.passed, [(case.name, case.first_failure(), case.error) for case in report.layouts]
    assert any("_adapter." in name for name in report.tensors)
    assert any("_adapter." not in name for name in report.tensors)
