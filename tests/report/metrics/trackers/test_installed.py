"""Trackers whose libraries this test installs: one run for two starts, offline, with every number and no secret."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tools.wheels import python_with

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]  # installs libraries of many packages


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = ("swanlab>=0.10,<0.11", "comet_ml>=3.58,<4", "aim>=3.29,<4")
    return python_with(tmp_path_factory.mktemp("trackers"), *wanted)


@pytest.mark.parametrize(
    ("tracker", "losses"),
    [
        # entries for each of the steps of a start, and one that defines the metric
        ("swanlab", [4.0, 3.0]),
        ("comet_ml", [3.0, 4.0, 5.0, 6.0, 7.0]),
        ("aim", [3.0, 4.0, 5.0, 6.0, 7.0]),
    ],
)
def test_a_tracker_has_one_run_for_all_starts(python: Path, tmp_path: Path, tracker: str, losses: list[float]) -> None:
    environment = {"SWANLAB_MODE": "offline", "COMET_START_ONLINE": "0", "HF_TOKEN": "s3cr3t-of-the-user"}
    environment |= {"PYTHONPATH": str(ROOT)}
    line = [str(python), "-m", "tests.report.metrics.trackers.two_starts", tracker, str(tmp_path)]
    found = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert found.returncode == 0, found.stderr
    assert "warning: tracker" not in found.stderr
    result = json.loads(found.stdout.splitlines()[-1])
    assert result["losses"] == losses
    assert list(result["ids"]) == [tracker]
    assert not result["has_secret"]
