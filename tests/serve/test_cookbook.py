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

from mtrain.hf.configuration import load_config
from tests.parity.cases import Case
from tests.pool import Pool
from tests.serve.cookbook import KEY, LONGEST, MODEL, run_recipe, shown, write_data, write_model, write_reader
from tests.serve.service import address_of, running
from tests.serve.test_clients import LAYOUTS, named
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
    for each in steps:
        # answers drawn without a seed may all have one length: no advantage, no gradient
        assert (each["grad_norm"] > 0) == (each["env/all/by_group/frac_mixed"] > 0)
        assert abs(each["optim/kl_sample_train_v1"]) < 1e-6
        assert each["optim/kl_sample_train_v2"] < 0.5 * 1e-5**2  # 1e-5 a token, as everywhere in float32


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numerics")
    write_reader(folder / MODEL)
    write_data(folder)
    return folder


@pytest.mark.parametrize("one", LAYOUTS[:5], ids=named)
def test_rl_numerics_check_finds_sampler_and_trainer_alike(pool: Pool, reader: Path, one: Case) -> None:
    """Reads documents page by page with a tool, in episodes of up to six turns, and trains on them."""
    keys = {"model.hf": reader / MODEL, "data.kind": "mock", "data.seq_length": LONGEST, "train.precision": "fp32"}
    keys |= {"train.device": "cpu", "train.global_batch_size": 8, "train.micro_batch_size": 1, "train.num_steps": 1}
    keys |= {"run.dir": reader / named(one), "optimizer.lr": 1e-4}
    keys |= {f"layout.{key}": value for key, value in one.layout.items() if key != "dp"}
    config = load_config([], [f"{key}={value}" for key, value in keys.items()])
    task = ["task.num_pages_min=1", "task.num_pages_max=2", "task.page_chars=80", "max_steps=2"]
    sizes = ["groups_per_batch=2", "group_size=4", "max_tokens=96", f"max_trajectory_tokens={LONGEST}", "lora_rank=8"]
    given = [f"model_name={MODEL}", f"log_path=logs/{named(one)}", "renderer_name=qwen3_instruct", *task, *sizes]
    with running(pool, one, config, reader / named(one)) as address:
        found = run_recipe(reader, address, "rl_numerics_check.train", given)
    steps = [each for each in found if "optim/kl_sample_train_v1" in each]
    assert len(steps) == 2
    assert max(each["env/all/turns_per_episode"] for each in steps) > 1
    assert any(each["grad_norm"] > 0 for each in steps)
    for each in steps:
        assert abs(each["optim/kl_sample_train_v1"]) < 1e-7
        assert each["optim/kl_sample_train_v2"] < 1e-11
