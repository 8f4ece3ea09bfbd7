"""Deterministic runs on a CPU: the numbers of any other run, and everything that is checked on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError
from mtrain.core.ranks.deterministic import VARIABLES
from tests.messages import refuses
from tests.pool import Pool
from tests.training import one_process
from tests.training.test_one_process import RUNS, saved, small
from tests.warm import completed, program_environment

ON = {"train__deterministic": True}
ADAPTER = {"adapter": {"rank": 2, "targets": ["embedding", "fc1"]}, "train__precision": "fp32"}


@pytest.mark.parametrize(
    ("layout", "changes"),
    # adapters add no operation that experts lack
    [RUNS["ep"], pytest.param(Layout(tp=2), ADAPTER | {"layout__tp": 2}, marks=pytest.mark.nightly)],
    ids=["ep", "adapter"],
)
def test_on_a_cpu_a_deterministic_run_has_the_same_numbers(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    plain, ordered = (small(tmp_path / name, changes | more) for name, more in (("plain", {}), ("ordered", ON)))
    for each in (plain, ordered):
        pool.run(one_process.train_fresh, layout, each, seed=each.train.seed)
    assert saved(tmp_path / "ordered") == saved(tmp_path / "plain") != {}


def mtrain(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return completed(
        [sys.executable, "-m", "mtrain", *arguments], environment=program_environment() | (environment or {})
    )


def test_a_run_folder_tells_how_the_run_was_made_deterministic(pool: Pool, tmp_path: Path) -> None:
    first = {name: values[0] for name, values in VARIABLES.items()}
    for name, more, expected in (("plain", {}, {}), ("ordered", ON, first)):
        (tmp_path / "run.yaml").write_text(small(tmp_path / name, more).model_dump_json())
        done = mtrain("train", tmp_path / "run.yaml")
        assert done.returncode == 0, done.stderr
        recorded = json.loads((tmp_path / name / "environment.json").read_text())
        assert {key: value for key, value in recorded.items() if key in VARIABLES} == expected
    assert "deterministic: true" in (tmp_path / "ordered" / "config.yaml").read_text()


def test_torchs_switch_is_as_before_afterwards(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(one_process.switch_after, Layout(), small(tmp_path, ON)) == [(False, True)]


def test_an_operation_that_cannot_be_deterministic_is_named(pool: Pool, tmp_path: Path) -> None:
    config = small(tmp_path, ON | {"loss__function": "tests.training.one_process:stirred"})
    with refuses(ConfigError, "train.deterministic=true", "put_"):
        pool.run(one_process.train_fresh, Layout(), config)


@pytest.mark.parametrize(
    ("given", "has_cuda_started", "words"),
    [
        ({"NCCL_ALGO": "Ring,Tree"}, False, ["NCCL_ALGO=Ring,Tree", "Ring or CollnetDirect"]),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, False, ["=:0:0", "ALGO=1"]),
        ({"NCCL_ALGO": "^NVLS"}, True, ["CUBLAS_WORKSPACE_CONFIG=:4096:8", "has used it already"]),
        ({"NCCL_ALGO": "^NVLS,Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, False, []),
        ({name: values[-1] for name, values in VARIABLES.items()}, True, []),
    ],
    ids=["nccl", "two", "too late", "chosen", "in time"],
)
def test_the_environment_has_to_agree(
    pool: Pool, given: dict[str, str], has_cuda_started: bool, words: list[str]
) -> None:
    (said,) = pool.run(one_process.refusal, Layout(), given, has_cuda_started)
    assert bool(said) == bool(words)
    assert all(word in said for word in words), said


def test_a_conflict_is_one_message(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(small(tmp_path / "run", ON | {"layout__tp": 2}).model_dump_json())
    done = mtrain("launch", "local", "-n", 2, tmp_path / "run.yaml", environment={"NCCL_ALGO": "Tree"})
    assert done.returncode == 7, done.stderr
    assert (done.stdout + done.stderr).count("error:") == 1
    assert "NCCL_ALGO=Tree" in done.stdout + done.stderr
