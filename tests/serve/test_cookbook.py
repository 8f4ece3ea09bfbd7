"""The recipes of tinker_cookbook against `mtrain serve`. Nights only: pip fetches them, and they are whole programs."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serve.cookbook import KEY, MODEL, run_recipe, shown, write_data, write_model
from tests.serve.service import address_of
from tests.serve.test_restart import started
from tests.warm import program_environment

pytestmark = [pytest.mark.nightly, pytest.mark.waits, pytest.mark.timeout(1800)]
SHOWN = shown()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    write_model(folder / MODEL)
    write_data(folder)
    return folder


@pytest.fixture(scope="module", params=["one rank", "tp2"])
def address(place: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Serves the tiny model, by a program of one rank or two."""
    shutil.rmtree(place / "logs", ignore_errors=True)
    (place / "key").write_text(KEY)
    given = {
        "run": {"dir": str(place / "served")},
        "model": {"hf": str(place / MODEL)},
        "data": {"kind": "mock", "seq_length": 448},
        "train": {"precision": "fp32", "device": "cpu", "global_batch_size": 8, "micro_batch_size": 8, "num_steps": 1},
        "optimizer": {"lr": 1e-4},
    }
    (place / "serve.yaml").write_text(yaml.safe_dump(given))
    if request.param == "one rank":
        command, found = started(place / "served", place / "serve.yaml", place / "key")
        yield found
        command.send_signal(signal.SIGTERM)
        assert command.wait() == 0
        return
    (place / "served" / "service.json").unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [*torchrun, "-m", "mtrain", "serve", str(place / "serve.yaml"), "layout.tp=2", "--port", "0"]
    with subprocess.Popen(line, env=program_environment(), stdout=subprocess.DEVNULL) as ranks:
        try:
            yield address_of(place / "served" / "service.json")
        finally:
            ranks.send_signal(signal.SIGTERM)
            ranks.wait(60)


def checkpoints(place: Path, recipe: str) -> list[dict[str, Any]]:
    lines = (place / "logs" / recipe / "checkpoints.jsonl").read_text().splitlines()
    return [json.loads(each) for each in lines]


def test_sl_loop_learns_and_goes_on_from_its_checkpoint(place: Path, address: str) -> None:
    options = SHOWN["sl_loop"]
    steps = run_recipe(place, address, "sl_loop", options)
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    assert steps[-1]["train_mean_nll"] < 0.9 * steps[0]["train_mean_nll"]
    assert [each["name"] for each in checkpoints(place, "sl_loop")] == ["000002", "final"]
    written = place / "logs" / "sl_loop" / "checkpoints.jsonl"
    written.write_text(written.read_text().splitlines()[0] + "\n")  # as where the client was killed after two steps
    again = run_recipe(place, address, "sl_loop", [each for each in options if each != "max_steps=4"])[4:]
    assert [each["step"] for each in again] == [3, 4, 5]
    assert again[0]["train_mean_nll"] == steps[2]["train_mean_nll"]  # to the bit


def test_chat_sl_learns_from_a_file_of_conversations(place: Path, address: str) -> None:
    steps = run_recipe(place, address, "chat_sl.train", SHOWN["chat_sl.train"])
    losses = [each["train_mean_nll"] for each in steps if "train_mean_nll" in each]
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_rl_loop_trains_on_rewarded_answers(place: Path, address: str, loss: str) -> None:
    shutil.rmtree(place / "logs" / "rl_loop", ignore_errors=True)
    options = [each for each in SHOWN["rl_loop"] if not each.startswith("loss_fn=")]
    steps = run_recipe(place, address, "rl_loop", [*options, f"loss_fn={loss}"])
    assert len(steps) == 2
    assert any(each.get("grad_norm", 0) > 0 for each in steps)
    assert any(0 < each["reward/total"] < 1 for each in steps)


def test_preference_by_dpo_prefers_what_was_chosen(place: Path, address: str) -> None:
    steps = run_recipe(place, address, "preference.dpo.train", SHOWN["preference.dpo.train"])
    losses = [each["dpo_loss"] for each in steps]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are the same
    assert losses[-1] < 0.5 * losses[0]


def test_preference_for_shorter_answers_sees_no_difference_of_sampler_and_trainer(place: Path, address: str) -> None:
    found = run_recipe(place, address, "preference.shorter.train", SHOWN["preference.shorter.train"])
    steps = [each for each in found if "optim/kl_sample_train_v1" in each]
    assert len(steps) == 2
    assert all(each["grad_norm"] > 0 for each in steps)
    for each in steps:
        assert abs(each["optim/kl_sample_train_v1"]) < 1e-6
        assert each["optim/kl_sample_train_v2"] < 0.5 * 1e-5**2  # 1e-5 a token, as everywhere in float32
