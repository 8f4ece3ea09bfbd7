"""Folders of small models that read images, with tokenizer, processor and weights, and records with pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.data.images import test_gemma3, test_gemma4, test_mistral3
from tests.data.images.cases import VISION_TOKENS, judge_of, picture, write_vision_folder
from tests.parity.image_models import KINDS, Kind

ROLES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_OTHERS: dict[Kind, tuple[Any, dict[str, str]]] = {
    "gemma3": (
        test_gemma3.write_gemma3,
        {name.replace("_token", "_token_index"): text for name, text in test_gemma3.TOKENS.items()},
    ),
    "mistral3": (test_mistral3.write_mistral3, {"image_token_id": test_mistral3.IMAGE}),
    "gemma4": (test_gemma4.write_gemma4, {"image_token_id": test_gemma4.IMAGE}),
}
"""Function that writes a folder, and tokens by role, of models other than Qwen's."""


def write_model(folder: Path, kind: Kind = "dense") -> Path:
    """Writes a small model with drawn weights, its tokenizer, template and processor."""
    write, roles = _OTHERS.get(kind, (write_vision_folder, dict(zip(ROLES, VISION_TOKENS))))
    write(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model_class, described = KINDS[kind]
    config = described()
    config.text_config.vocab_size = tokenizer.get_vocab_size() + 2
    for role, text in roles.items():
        setattr(config, role, tokenizer.token_to_id(text))
    if kind == "gemma4":
        config.vision_config.position_embedding_size = 280  # an image of 70 tokens may be a line of them
    torch.manual_seed(5)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        is_scale = ("norm" in name or "ln_pre" in name) and name.endswith("weight")
        is_scale &= kind != "gemma3" or "vision_tower" in name  # its others are stored minus 1
        torch.nn.init.normal_(parameter, mean=1.0 if is_scale else 0.0, std=0.1)
    model.save_pretrained(folder)
    return folder


def judge_of_kind(folder: Path, kind: Kind) -> Any:
    """Opens a folder's processor in transformers."""
    match kind:
        case "gemma3":
            return test_gemma3.judge_of(folder)
        case "mistral3":
            return test_mistral3.judge_of(folder)
        case "gemma4":
            return test_gemma4.judge_of(folder)
        case _:
            return judge_of(folder)


def loaded(folder: Path, kind: Kind = "dense") -> Any:
    """Loads a folder's model by transformers, in float64."""
    model_class, described = KINDS[kind]
    model = model_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    if kind.endswith("experts"):
        model.config.text_config._experts_implementation = described().text_config._experts_implementation
    return model


def write_records(folder: Path, count: int = 6) -> list[dict[str, Any]]:
    """Writes records with no, one or two images, and returns them."""
    draw, records = random.Random(3), list[dict[str, Any]]()
    for number in range(count):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"number {number}?"}]
        for index in range(number % 3):
            path = folder / f"{number}-{index}.png"
            path.write_bytes(picture(draw, size=(8 * draw.randint(3, 6), 8 * draw.randint(2, 5))))
            parts.insert(draw.randint(0, len(parts)), {"type": "image", "path": path.name})
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"It is {number}."}]
        records.append({"messages": messages})
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return records
