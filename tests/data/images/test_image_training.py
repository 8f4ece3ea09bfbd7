"""Losses of a run on files with images, against transformers' own processor and model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from tests.data.images.cases import JudgeOfImages, judge_of
from tests.data.images.models import write_model, write_records
from tests.data.images.ranks import losses, scores_and_loss
from tests.pool import Pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small Qwen3.5."""
    return write_model(tmp_path_factory.mktemp("model"))


def expected_loss(folder: Path, judge: JudgeOfImages, records: list[dict[str, Any]], data: Path) -> float:
    """Computes the mean loss of the answers' tokens in float64."""
    sums = answer_losses(folder, judge, records, data)
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def answer_losses(
    folder: Path, judge: JudgeOfImages, records: list[dict[str, Any]], data: Path
) -> list[tuple[float, int]]:
    """Sums the losses of each answer's tokens in float64, one record at a time; also counts the tokens."""
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    end = judge.tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = []
    for record in records:
        messages = json.loads(json.dumps(record["messages"]))
        for part in messages[0]["content"]:
            part.update({"path": str(data / part["path"])} if "path" in part else {})
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        asked = judge.apply_chat_template(messages[:1], add_generation_prompt=True, **how)["input_ids"].shape[1]
        inputs = judge.apply_chat_template(messages, **how)
        ids = inputs["input_ids"][0]
        stop = int((ids == end).nonzero()[-1])
        seen = {
            name: value.double() if value.is_floating_point() else value
            for name, value in inputs.items()
            if name != "attention_mask"
        }
        with torch.no_grad():
            logits = model(**seen).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[asked - 1 : stop], ids[asked : stop + 1], reduction="none")
        found.append((float(losses.sum()), len(losses)))
    return found


def test_files_with_images_train_as_in_transformers(folder: Path, pool: Pool, tmp_path: Path) -> None:
    """Rows are packed and cut, so images lie across the border of two ranks, and after other samples."""
    records, layout = write_records(tmp_path), Layout(cp=2)
    content = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hf": str(folder), "vision": {"freeze_tower": False, "freeze_projector": False}},
        "train": {"global_batch_size": 6, "micro_batch_size": 1, "num_steps": 2, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "layout": {"cp": layout.cp},
        "data": {
            "kind": "sft",
            "seq_length": 80,
            "tokenizer": str(folder),
            "packing": {"batch": "sequences"},
            "train": [{"path": str(tmp_path / "a.jsonl")}],
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    (first, second), *others = pool.run(losses, layout, Config.model_validate(with_architecture(content)))
    assert all(each == [first, second] for each in others)
    assert first == pytest.approx(expected_loss(folder, judge_of(folder), records, tmp_path), rel=1e-6)
    assert second < first


def test_scores_of_a_reference_model_read_the_images(folder: Path, pool: Pool, tmp_path: Path) -> None:
    """The reference is the model that the run starts from, tower included, so DPO begins at log 2."""
    asked = [record["messages"][:1] for record in write_records(tmp_path)]
    answers = [
        [{"role": "assistant", "content": f"{text} {number}."}] for text in ("It is", "No,") for number in range(6)
    ]
    pairs = [{"prompt": each, "chosen": answers[n], "rejected": answers[n + 6]} for n, each in enumerate(asked)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    content = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hf": str(folder), "vision": {"freeze_tower": False}},
        "train": {"global_batch_size": 6, "micro_batch_size": 2, "num_steps": 1, "precision": "fp32"},
        "optimizer": {"lr": 1e-2},
        "loss": {"function": "dpo"},
        "data": {
            "kind": "sft",
            "seq_length": 80,
            "tokenizer": str(folder),
            "format": "preference",
            "train": [{"path": str(tmp_path / "pairs.jsonl")}],
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    config = Config.model_validate(with_architecture(content))
    records = [{"messages": prompt + answers[n + each]} for n, prompt in enumerate(asked) for each in (0, 6)]
    expected = [-total for total, _ in answer_losses(folder, judge_of(folder), records, tmp_path)]
    (tmp_path / "run").mkdir()
    for scores, loss in pool.run(scores_and_loss, Layout(dp=2), config):
        assert scores == pytest.approx(expected, rel=1e-6)
        assert loss == pytest.approx(math.log(2), rel=1e-12)
