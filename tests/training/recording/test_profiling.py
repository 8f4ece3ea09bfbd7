"""Profiled steps: trace and table of the chosen ranks, and a run whose numbers stay the same bit for bit."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from mtrain.base.errors import ConfigError
from mtrain.hf.configuration import load_config
from mtrain.report.metrics.jsonl import read_records
from mtrain.report.metrics.record import StepRecord
from tests.messages import refuses
from tests.training.test_trainer import BASE
from tests.warm import completed


def run(folder: Path, name: str, *arguments: str, ranks: int = 2) -> list[tuple[float, float]]:
    """Returns loss and gradient norm of each step."""
    (folder / "base.yaml").write_text(BASE)
    verb = ["train"] if ranks == 1 else ["launch", "local", "-n", str(ranks)]
    command = [sys.executable, "-m", "mtrain", *verb, folder / "base.yaml", f"layout.tp={ranks}"]
    done = completed([*command, f"run.dir={folder / name}", *arguments], folder)
    assert done.returncode == 0, done.stderr
    records = read_records(folder / name / "metrics.jsonl")
    return [(each.loss, each.grad_norm) for each in records if isinstance(each, StepRecord)]


@pytest.mark.usefixtures("pool")
def test_a_profile_tells_the_operations_and_changes_no_number(tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", "train.num_steps=3")
    assert not (tmp_path / "plain" / "profile").exists()
    profile = ("metrics.profile_steps=[2,2]", "metrics.profile_ranks=[1]")
    assert run(tmp_path, "profiled", "train.num_steps=3", *profile) == plain
    folder = tmp_path / "profiled" / "profile"
    stem = "rank_00001.steps_2_to_2"
    assert sorted(path.name for path in folder.iterdir()) == [f"{stem}.kernels.txt", f"{stem}.trace.json.gz"]
    table = (folder / f"{stem}.kernels.txt").read_text()
    assert "aten::mm" in table
    assert "CPU Mem" in table
    events = json.loads(gzip.decompress((folder / f"{stem}.trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) > 10


@pytest.mark.usefixtures("pool")
@pytest.mark.nightly  # the same file at the end of the steps: above
def test_steps_that_the_run_does_not_reach_cut_the_profile_off(tmp_path: Path) -> None:
    run(tmp_path, "short", "train.num_steps=1", "metrics.profile_steps=[1,60]", ranks=1)
    assert (tmp_path / "short" / "profile" / "rank_00000.steps_1_to_60.kernels.txt").exists()


def test_steps_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    with refuses(ConfigError, "profile_steps=[4, 3]"):
        load_config([tmp_path / "base.yaml"], ["run.dir=x", "metrics.profile_steps=[4,3]"])
