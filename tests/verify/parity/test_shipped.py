"""Every shipped configuration passes, made small, on all layouts derived from its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.hf.configuration import load_config
from mtrain.verify.core.ranks import Pool
from mtrain.verify.parity import refuse_without_reference
from tests.messages import refuses
from tests.paths import CONFIGS
from tests.recipes import NAMES, shipped
from tests.verify.parity.checks import check


@pytest.mark.nightly  # by day its layouts are legal: tests/verify/core/test_any_key.py; families: tests/parity/models
@pytest.mark.parametrize("name", NAMES)
def test_what_is_shipped_passes(name: str, pool: Pool, tmp_path: Path) -> None:
    report = check(pool, shipped(name, tmp_path), num_steps=1)
    assert report.passed, [(layout.name, layout.first_failure(), layout.error) for layout in report.layouts]
    assert len(report.layouts) > 4


@pytest.mark.parametrize("run", ["preference", "reward_model"])
def test_runs_without_a_second_definition_are_refused_by_name(run: str) -> None:
    config = load_config([CONFIGS / "model" / "llama3.2_1b.yaml", CONFIGS / "run" / f"{run}.yaml"])
    with refuses(ConfigError):
        refuse_without_reference(config)
