"""Runs of adapters are stopped and resumed like all others; their base is compared too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.config import Config
from tests.config.samples import config
from tests.verify.kept import KeptPool
from tests.verify.resume.test_run import gone_on, lively_config


@pytest.mark.parametrize(
    ("user", "layouts", "max_ranks", "whole"),
    [
        (config, "tp2", 2, ["embedding", "output"]),
        pytest.param(config, "tp2", 2, [], marks=pytest.mark.nightly),
        # by day test_run.py has fp16 and dropout
        pytest.param(lively_config, "pp2", 4, ["embedding", "output", "norms"], marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly  # tests/core/adapters/test_adapter_state.py has both by day
def test_adapters_resume_bit_for_bit_and_on_another_layout(
    kept: KeptPool, tmp_path: Path, user: Callable[..., Config], layouts: str, max_ranks: int, whole: list[str]
) -> None:
    adapter = {"kind": "dora", "rank": 4, "targets": ["qkv", "fc2"], "modules_to_save": whole}
    check, _ = gone_on(kept, tmp_path, user(adapter=adapter), layouts, max_ranks)
    assert any("_adapter." in name for name in check.tensors)
    assert any("_adapter." not in name for name in check.tensors)
