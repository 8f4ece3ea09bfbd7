"""A folder of a small model that reads images, random images, and transformers' processor as the oracle."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3_5Model, Qwen3VLProcessor

from mtrain.config.schema.data import ImagesSection
from mtrain.config.schema.vision import VisionSection
from mtrain.hf.images import ImageProcessor
from tests.data.chat.cases import write_folder

TEMPLATE = Path(__file__).with_name("qwen3_vl.jinja")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MERGE = 2
MODES = {"RGB": "JPEG", "L": "PNG", "RGBA": "PNG", "P": "GIF", "CMYK": "JPEG", "1": "PNG", "LA": "PNG", "YCbCr": "TIFF"}
"""Modes of 8 bits -> a format that stores them."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"shortest_edge": 128, "longest_edge": 1600},
}


def write_vision_folder(folder: Path) -> Path:
    """Writes tokenizer, template and image processor of a model."""
    write_folder(folder, TEMPLATE.read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def image_token(folder: Path) -> int:
    """Returns the id of the image token."""
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|image_pad|>")
    assert token is not None, "a token of the folder"
    return token


def vision_of(folder: Path, **changed: Any) -> dict[str, Any]:
    """Returns the keys of a vision tower for the folder's image processor."""
    tower = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "num_positions": 16}
    read = {"patch_size": 4, "merge_size": MERGE, "rope_sections": [1, 1, 0], "image_token": image_token(folder)}
    return {**tower, **read, **changed}


def processor_of(
    folder: Path, limits: Mapping[str, int | None] = MappingProxyType({}), **vision: Any
) -> ImageProcessor:
    """Opens the folder's image processor as a run does."""
    section = VisionSection.model_validate(vision_of(folder, **vision))
    return ImageProcessor(folder, section, ImagesSection.model_validate(dict(limits)))


class JudgeOfImages(Qwen3VLProcessor):
    """transformers' processor without its part for video, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def judge_of(folder: Path) -> JudgeOfImages:
    """Opens the folder's processor in transformers."""
    images, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return JudgeOfImages(images, tokenizer, (folder / "chat_template.jinja").read_text())


def axes_of_transformers(ids: Any, grids: Any, token: int) -> Any:
    """Computes the positions of one document, [n, 3], by the function of a model."""
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE)))
    model.get_vision_position_ids = partial(Qwen3_5Model.get_vision_position_ids, model)
    tokens = torch.tensor(np.array([ids], np.int64))
    positions, _ = Qwen3_5Model.get_rope_index(
        model, tokens, (tokens == token).int(), image_grid_thw=torch.tensor(np.array(grids, np.int64))
    )
    return positions[:, 0].T.numpy()


def picture(draw: random.Random, mode: str = "RGB", size: tuple[int, int] | None = None, **options: Any) -> bytes:
    """Returns an image file of random pixels, in the format of its mode."""
    width, height = size or (draw.randint(1, 60), draw.randint(1, 60))
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (height, width, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise, "RGBA").convert(mode).save(file, options.pop("format", MODES[mode]), **options)
    return file.getvalue()


def drawn_turns(draw: random.Random, folder: Path) -> list[tuple[list[dict[str, str]], str]]:
    """Draws one or two turns: a question of texts and images in any order, some without images, and its answer."""
    turns = []
    for turn in range(draw.randint(1, 2)):
        parts = [{"type": "text", "text": draw.choice(["a", "two\n\n", "\n three "])}]
        for number in range(draw.randint(0, 2)):
            path = folder / f"{turn}-{number}"
            path.write_bytes(picture(draw))
            parts.insert(draw.randint(0, len(parts)), {"type": "image", "path": str(path)})
        turns.append((parts, draw.choice(["A cat.", "No"])))
    return turns
