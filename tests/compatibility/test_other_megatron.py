"""A run that was saved under one of the two proven versions of megatron-core goes on under the other, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.samples import content
from tests.config.yaml_files import write
from tests.warm import completed, program_environment

RUN = content(
    model__num_layers=2,
    model__hidden_size=32,
    model__ffn_hidden_size=64,
    model__vocab_size=96,
    model__mtp_depths=1,
    model__experts__num_experts=4,
    model__experts__top_k=2,
    model__experts__ffn_hidden_size=32,
    model__experts__expert_bias=True,
    model__experts__bias_update_rate=1e-3,
    train__num_steps=4,
    train__global_batch_size=4,
    data__seq_length=16,
    checkpoint__interval_steps=2,
)


def trained(python: Path | str, file: Path, run: Path, ranks: int) -> dict[int, dict[str, Any]]:
    """Trains to the end under an interpreter, and returns the record of each step."""
    verb = ["launch", "local", "-n", str(ranks)] if ranks > 1 else ["train"]
    command = [str(python), "-m", "mtrain", *verb, str(file), f"run.dir={run}"]
    if python == sys.executable:
        done = completed(command, file.parent)
    else:  # no process of ours has imported it
        environment = program_environment()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in lines if record["kind"] == "step"}


def digests(run: Path) -> dict[str, str]:
    """Returns what the last checkpoint says of its files of tensors: weights and moments of every rank."""
    files = json.loads((run / "checkpoints" / "step_00000004" / "mtrain.json").read_text())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".distcp")}


@pytest.mark.parametrize(
    ("saved_here", "layout"),
    [
        # each way writes both formats; interpreters start for every rank, and tests/core/state has the layouts
        (True, {}),
        *(pytest.param(each, {"tp": 2, "sp": True, "ep": 2}, marks=pytest.mark.nightly) for each in (True, False)),
    ],
    ids=["one rank", "this to the other", "the other to this"],
)
def test_a_run_goes_on_under_the_other_version(
    tmp_path: Path, other_python: Path, saved_here: bool, layout: dict[str, Any]
) -> None:
    file, ranks = write(tmp_path / "run.yaml", {**RUN, "layout": layout}), layout.get("tp", 1)
    first, second = (sys.executable, other_python) if saved_here else (other_python, sys.executable)
    before = trained(first, file, tmp_path / "before", ranks)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    shutil.rmtree(tmp_path / "after" / "checkpoints" / "step_00000004")
    after = trained(second, file, tmp_path / "after", ranks)

    versions = [
        json.loads((tmp_path / run / "checkpoints" / "step_00000004" / "mtrain.json").read_text())["versions"]
        for run in ("before", "after")
    ]
    assert {each["megatron-core"] for each in versions} == {"0.16.1", "0.19.2"}
    for step in range(1, 5):
        for quantity in ("loss", "grad_norm", "lr", "denominator"):
            assert after[step][quantity] == before[step][quantity], (step, quantity)
    assert digests(tmp_path / "before") == digests(tmp_path / "after") != {}
