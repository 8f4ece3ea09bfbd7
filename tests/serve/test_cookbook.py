"""The recipes of tinker_cookbook against `mtrain serve`. Nights only: pip fetches them, and they are whole programs."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serve.cookbook import KEY, MODEL, run_recipe, write_data, write_model
from tests.serve.test_restart import started

pytestmark = [pytest.mark.nightly, pytest.mark.waits, pytest.mark.timeout(1800)]
COMMON = [f"model_name={MODEL}"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_model(folder / MODEL)
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """Serves the tiny model, by a program."""
    (place / "key").write_text(KEY)
    given = {
        "run": {"dir": str(place / "served")},
        "model": {"hf": str(place / MODEL)},
        "data": {"kind": "mock", "seq_length": 448},
        "train": {"precision": "fp32", "device": "cpu", "global_batch_size": 8, "micro_batch_size": 8, "num_steps": 1},
        "optimizer": {"lr": 1e-4},
    }
    (place / "serve.yaml").write_text(yaml.safe_dump(given))
    command, found = started(place / "served", place / "serve.yaml", place / "key")
    yield found
    command.send_signal(signal.SIGTERM)
    assert command.wait() == 0


def checkpoints(place: Path, recipe: str) -> list[dict[str, Any]]:
    lines = (place / "logs" / recipe / "checkpoints.jsonl").read_text().splitlines()
    return [json.loads(each) for each in lines]


def test_sl_loop_learns_and_goes_on_from_its_checkpoint(place: Path, address: str) -> None:
    options = [*COMMON, "batch_size=8", "learning_rate=3e-3", "lora_rank=8", "save_every=2"]
    steps = run_recipe(place, address, "sl_loop", [*options, "max_steps=4"])
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    assert steps[-1]["train_mean_nll"] < 0.9 * steps[0]["train_mean_nll"]
    assert [each["name"] for each in checkpoints(place, "sl_loop")] == ["000002", "final"]
    written = place / "logs" / "sl_loop" / "checkpoints.jsonl"
    written.write_text(written.read_text().splitlines()[0] + "\n")  # as where the client was killed after two steps
    again = run_recipe(place, address, "sl_loop", options)[4:]
    assert [each["step"] for each in again] == [3, 4, 5]
    assert again[0]["train_mean_nll"] == steps[2]["train_mean_nll"]  # to the bit


def test_chat_sl_learns_from_a_file_of_conversations(place: Path, address: str) -> None:
    data = place / "HuggingFaceH4" / "no_robots" / "train.jsonl"
    given = [f"dataset={data}", "batch_size=8", "learning_rate=3e-3", "max_length=256", "save_every=2", "num_epochs=2"]
    rolling = ["rolling_save_every=1", "max_steps=6", "lora_rank=8", "renderer_name=role_colon", "eval_every=0"]
    steps = run_recipe(place, address, "chat_sl.train", [*COMMON, *given, *rolling])
    losses = [each["train_mean_nll"] for each in steps if "train_mean_nll" in each]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_on_rewarded_answers(place: Path, address: str, loss: str) -> None:
    given = ["batch_size=12", "group_size=8", "max_tokens=16", "lora_rank=8", "learning_rate=1e-4", "save_every=1"]
    shutil.rmtree(place / "logs" / "rl_loop", ignore_errors=True)
    steps = run_recipe(place, address, "rl_loop", [*COMMON, *given, f"loss_fn={loss}"])
    assert len(steps) == 2
    assert any(each.get("grad_norm", 0) > 0 for each in steps)
    assert any(0 < each["reward/total"] < 1 for each in steps)


def test_preference_by_dpo_prefers_what_was_chosen(place: Path, address: str) -> None:
    given = ["dataset=hhh", "batch_size=8", "learning_rate=1e-3", "max_length=256", "max_steps=4"]
    steps = run_recipe(place, address, "preference.dpo.train", [*COMMON, *given, "renderer_name=role_colon"])
    losses = [each["dpo_loss"] for each in steps]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are the same
    assert losses[-1] < 0.5 * losses[0]


def test_preference_for_shorter_answers_sees_no_difference_of_sampler_and_trainer(place: Path, address: str) -> None:
    given = ["batch_size=2", "group_size=8", "max_tokens=32", "learning_rate=1e-4", "max_steps=2", "eval_every=0"]
    found = run_recipe(place, address, "preference.shorter.train", [*COMMON, *given, "renderer_name=role_colon"])
    steps = [each for each in found if "optim/kl_sample_train_v1" in each]
    assert len(steps) == 2
    assert all(each["grad_norm"] > 0 for each in steps)
    for each in steps:
        assert abs(each["optim/kl_sample_train_v1"]) < 1e-6
        assert each["optim/kl_sample_train_v2"] < 0.5 * 1e-5**2  # 1e-5 a token, as everywhere in float32
