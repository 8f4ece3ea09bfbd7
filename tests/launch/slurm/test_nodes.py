"""What `mtrain launch slurm` takes from the nodes, as a stand-in for sinfo describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.slurm.test_submit import CONFIG, install, launch
from tests.messages import check_message


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SINFO = """#!/bin/bash
printf '%s\\n' "$@" > asked
echo 'gpu|112|gpu:h100:8(S:0-1)'; echo 'gpu|128+|gpu:h100:8,nvme:1'; [[ $* = *partition* ]] || echo 'cpu*|64|(null)'
"""


def test_cores_follow_from_the_nodes_and_gpus_are_asked_for(folder: Path) -> None:
    install(folder, {"sinfo": SINFO})

    batch = ("run.dir=runs/a", "train.global_batch_size=1040")

    def cores(*arguments: str) -> list[str]:
        done = launch(folder, *batch, "--dry-run", "--without-files", *arguments)
        assert done.returncode == 0, done.stderr
        found = [line for line in done.stdout.splitlines() if "cpus-per-task" in line]
        assert ("note: --cpus-per-task" in done.stderr) == (bool(found) and "--cpus-per-task=3" not in arguments)
        return found

    of_gpu = ("--nodes=2", "--partition=gpu")
    assert cores(*of_gpu, "--gpus-per-node=8") == ["#SBATCH --cpus-per-task=14"]
    assert "--partition=gpu" in (folder / "asked").read_text().splitlines()
    assert cores("--nodes=1", "--partition=gpu", "--gpus-per-node=2") == ["#SBATCH --cpus-per-task=14"], "of two GPUs"
    assert cores(*of_gpu, "--gpus-per-task=1", "--ntasks-per-node=4") == ["#SBATCH --cpus-per-task=14"]
    assert cores(*of_gpu, "--gpus-per-node=8", "--cpus-per-task=3") == ["#SBATCH --cpus-per-task=3"]
    assert cores("--nodes=2", "--ntasks-per-node=2") == ["#SBATCH --cpus-per-task=32"], "of the default partition"
    assert cores("--nodes=2", "--ntasks-per-node=65") == [], "more ranks than cores: Slurm decides"
    refused = launch(folder, *batch, *of_gpu, "--dry-run")
    assert refused.returncode == 2
    check_message(refused.stderr, "8 GPUs", "--gpus-per-node 8", "train.device=cpu")
    assert cores(*of_gpu, "train.device=cpu") == ["#SBATCH --cpus-per-task=112"]
