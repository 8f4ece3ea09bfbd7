"""Runs, checkpoints and configurations of version 0.1.0 go on as if nothing had changed.

The archive was written by the program at commit 1f92f0f, before its tree and its words changed: two runs of 8 steps on
two ranks each (`dense` under tp 2 with a side term named by its old path, a cosine schedule that ends with the run;
`mla` under ep 2 with latent attention and experts), with YAML files, all records and the checkpoint of step 4 alone.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.warm import completed

ARCHIVE = Path(__file__).with_name("runs_of_0.1.0.tar.xz")


def steps(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> its record."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in lines if record["kind"] == "step"}


@pytest.mark.parametrize(("name", "layout"), [("dense", "layout.tp=2"), ("mla", "layout.ep=2")])
def test_a_run_goes_on_from_its_checkpoint_with_the_numbers_of_its_own_version(
    tmp_path: Path, name: str, layout: str
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    before = steps(tmp_path / name)
    assert sorted(before) == list(range(1, 9))

    command = [sys.executable, "-m", "mtrain", "launch", "local", "-n", "2", f"{name}.yaml", f"run.dir={name}", layout]
    done = completed(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{name}/checkpoints/step_00000004" in done.stdout, "it starts from the checkpoint"
    assert done.stdout.count("optimizer.schedule_convention=one_ahead stays, since this run began with it") == 1
    assert done.stdout.count("its manifest, of version 0.1.0, has no checksum of itself") == 1
    assert "schedule_convention: one_ahead" in (tmp_path / name / "config.yaml").read_text()

    after = steps(tmp_path / name)
    assert sorted(after) == sorted(before)
    for step in range(5, 9):
        old, new = before[step], after[step]
        assert (new["lr"], new["denominator"]) == (old["lr"], old["denominator"]), step
        for quantity in ("loss", "grad_norm", "objective"):  # 1e-6: other processors add in another order
            assert new[quantity] == pytest.approx(old[quantity], rel=1e-6), (step, quantity)
