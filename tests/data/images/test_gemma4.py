"""Images of Gemma 4: ids and patches are those of transformers' processor, which resizes to a number of patches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer, Gemma4Processor

from mtrain.base.errors import DataError
from mtrain.config.schema.data import ImagesSection, SftSection
from mtrain.config.schema.vision import VisionSection
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import write_folder
from tests.data.images.cases import drawn_turns, picture
from tests.messages import refuses

PATCH, MERGE = 4, 2
IMAGE = "<|image|>"
TOKENS = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": IMAGE}
AUDIO = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|turn>{{ 'user' if message.role == 'user' else 'model' }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""
PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": PATCH,
    "pooling_kernel_size": MERGE,
    "max_soft_tokens": 70,
}


class Judge(Gemma4Processor):
    """transformers' processor without its parts for video and audio, which need other packages."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def judge_of(folder: Path) -> Judge:
    """Opens transformers' processor."""
    images, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return Judge(None, images, tokenizer, None, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4(tmp_path_factory.mktemp("gemma4"))


def write_gemma4(folder: Path) -> Path:
    """Writes tokenizer, template and processor as Gemma 4 is published."""
    write_folder(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*TOKENS.values(), *AUDIO.values(), "<|turn>", "<turn|>", "<bos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<turn|>", "bos_token": "<bos>", "pad_token": "<pad>", **TOKENS, **AUDIO}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_special_tokens": TOKENS | AUDIO}))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma4Processor", "image_processor": PROCESSOR})
    )
    return folder


def opened(folder: Path, **limits: int) -> tuple[RecordEncoder, ImageProcessor]:
    """Opens the folder as a run does."""
    section = SftSection.model_validate(
        {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "train": [{"path": "a"}]}
    )
    vision = VisionSection(
        kind="gemma4",
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=2,
        num_positions=280,
        patch_size=PATCH,
        merge_size=MERGE,
        frames_per_patch=1,
        image_token=Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(IMAGE),
    )
    images = ImageProcessor(folder, vision, ImagesSection.model_validate(limits))
    return RecordEncoder(section, load_tokenizer(folder), images), images


@pytest.mark.parametrize("seed", range(6))
def test_a_conversation_is_that_of_transformers(seed: int, folder: Path, tmp_path: Path) -> None:
    judge = judge_of(folder)
    messages: list[dict[str, Any]] = []
    for parts, answer in drawn_turns(random.Random(seed), tmp_path):
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    expected = judge.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    encoder, processor = opened(folder)
    sample = encoder.encode({"messages": messages}, tmp_path)
    assert sample.ids.tolist() == expected["input_ids"][0].tolist()
    assert not sample.loss_weights[expected["mm_token_type_ids"][0].numpy() == 1].any()
    found = list(sample.images)
    theirs = zip(expected.get("pixel_values", []), expected.get("image_position_ids", []), strict=True)
    for image, (pixels, places) in zip(found, theirs, strict=True):
        is_patch = places[:, 0] >= 0
        _, rows, columns = image.grid
        assert places[is_patch].tolist() == [[x, y] for y in range(rows) for x in range(columns)]
        np.testing.assert_array_equal(processor.patches(image.content).pixels, pixels[is_patch].numpy())


def test_what_transformers_would_read_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(random.Random(1)))
    image: dict[str, Any] = {"type": "image", "path": "a.png"}
    answer = {"role": "assistant", "content": "A cat."}
    asked = {"messages": [{"role": "user", "content": [image]}, answer]}
    with refuses(DataError, "data.images.min_pixels"):
        opened(folder, max_pixels=100)[0].encode(asked, tmp_path)
    for kind in ("audio", "video"):
        other = {"type": kind, kind: "a.mp4"}
        with refuses(DataError, kind):
            opened(folder)[0].encode({"messages": [{"role": "user", "content": [other]}, answer]}, tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"processor_class": "Gemma4Processor", "image_processor": PROCESSOR | {"pooling_kernel_size": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    with refuses(DataError, "pooling_kernel_size=3"):
        opened(tmp_path)[0].encode(asked, tmp_path)
