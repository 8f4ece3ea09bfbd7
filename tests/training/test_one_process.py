"""`train` may be called again in the same process and off its main thread: each run equals that of a fresh process."""

import json
from pathlib import Path
from typing import Any

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.launch.local import free_port
from tests.config.samples import config
from tests.pool import Pool
from tests.training import one_process
from tests.training.test_trainer import numbers

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "bias_update_rate": 0.01, "score": "sigmoid"}
RUNS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pp": (
        Layout(pp=2, vpp=2),
        {"layout__pp": 2, "layout__vpp": 2, "model__num_layers": 4, "model__hidden_dropout": 0.1, "train__seed": 7},
    ),
    "ep": (
        Layout(dp=2, ep=2),
        {
            "layout__ep": 2,
            "model__experts": EXPERTS | {"expert_bias": True},
            "loss__router": {"z_coefficient": 0.1},
            "train__precision": "fp32",
        },
    ),
}


def small(folder: Path, changes: dict[str, Any]) -> Config:
    shared = {
        "model__num_layers": 2,
        "train__num_steps": 1,
        "train__global_batch_size": 4,
        "metrics__tensorboard": False,
    }
    return config(run__dir=str(folder), **(shared | changes))


def saved(run: Path) -> dict[str, Any]:
    """Returns the digest of every file with tensors of the last checkpoint."""
    manifest = json.loads((run / "checkpoints" / "step_00000001" / "mtrain.json").read_text())
    return {name: facts["blake3"] for name, facts in manifest["files"].items() if name.endswith(".distcp")}


def test_runs_in_one_process_are_those_of_fresh_processes(pool: Pool, tmp_path: Path) -> None:
    together = [small(tmp_path / "together" / name, changes) for name, (_, changes) in RUNS.items()]
    pool.run(one_process.train_all, RUNS["pp"][0], together, free_port(), str(tmp_path / "store"))
    layout, changes = RUNS["ep"]  # the first run of a process has nothing to find
    alone = small(tmp_path / "fresh", changes)
    pool.run(one_process.train_fresh, layout, alone, seed=alone.train.seed)
    again = tmp_path / "together" / "ep"
    assert numbers(again) == numbers(tmp_path / "fresh")
    assert len(numbers(again)) == 1
    assert saved(again) == saved(tmp_path / "fresh") != {}


def test_memory_of_saves_is_taken_once_and_during_training(pool: Pool, tmp_path: Path) -> None:
    """Memory is taken early where a save is planned; a save that only a signal may ask for takes it when needed."""
    cases = {"saved": ({"interval_steps": 2}, ["snapshot-memory"]), "in-line": ({"async_save": False}, [])}
    cases["never"] = ({"at_end": False}, [])
    for name, (changes, threads) in cases.items():
        small_config = small(tmp_path / name, {"train__num_steps": 3, "checkpoint": changes})
        assert pool.run(one_process.memory_of_saves, Layout(), small_config) == [threads], name
