"""Runs of adapters are stopped, killed and resumed like all others; the base is compared with them."""

from __future__ import annotations

from tests.pool import Pool
from tests.verify.resume.test_run import lively_config, resumed


def test_adapters_resume_bit_for_bit_and_on_another_layout(pool: Pool) -> None:
    adapter = {"kind": "dora", "rank": 4, "targets": ["qkv", "fc2"]}
    report = resumed(pool, lively_config(adapter=adapter), "pp2")
    assert report.passed, [(case.name, case.first_failure(), case.error) for case in report.layouts]
    assert any("_adapter." in name for name in report.tensors)
    assert any("_adapter." not in name for name in report.tensors)
