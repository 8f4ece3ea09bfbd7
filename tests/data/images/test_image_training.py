"""Losses of a run on files with images, against transformers' own processor and model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.hf.schema.description import with_architecture
from tests.data.images.cases import VISION_TOKENS, JudgeOfImages, judge_of, picture, write_vision_folder
from tests.data.images.ranks import losses
from tests.parity.images import dense_config
from tests.pool import Pool

ROLES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small Qwen3.5 with tokenizer, template, processor and weights."""
    folder = write_vision_folder(tmp_path_factory.mktemp("model"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = dense_config()
    config.text_config.vocab_size = tokenizer.get_vocab_size() + 2
    for role, text in zip(ROLES, VISION_TOKENS):
        setattr(config, role, tokenizer.token_to_id(text))
    torch.manual_seed(5)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.1)
    model.save_pretrained(folder)
    return folder


def write_records(folder: Path) -> list[dict[str, Any]]:
    """Writes six records with no, one or two images in questions and results of tools; returns their messages."""
    draw, conversations = random.Random(3), list[list[dict[str, Any]]]()
    for number in range(6):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"number {number}?"}]
        for index in range(number % 3):
            path = folder / f"{number}-{index}.png"
            path.write_bytes(picture(draw, size=(8 * draw.randint(3, 6), 8 * draw.randint(2, 5))))
            parts.insert(draw.randint(0, len(parts)), {"type": "image", "path": path.name})
        conversations.append([{"role": "user", "content": parts}, {"role": "assistant", "content": f"It is {number}."}])
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return [{"messages": each} for each in conversations]


def expected_loss(folder: Path, judge: JudgeOfImages, records: list[dict[str, Any]], data: Path) -> float:
    """Computes the mean loss of the answers' tokens in float64, one record at a time."""
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    end = judge.tokenizer.convert_tokens_to_ids("<|im_end|>")
    total, count = 0.0, 0
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
        total, count = total + float(losses.sum()), count + len(losses)
    return total / count


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
