"""Images of Gemma 3: token ids and pixels are those of transformers' processor, which writes text around each image."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor

from mtrain.base.errors import DataError
from mtrain.config.schema.data import ImagesSection, SftSection
from mtrain.config.schema.vision import VisionSection
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.hf.images import ImageProcessor
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.chat.cases import write_folder
from tests.data.images.cases import drawn_turns, picture
from tests.messages import refuses

SIDE, PATCH, MERGE = 6, 4, 2
TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessorFast",
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "size": {"height": SIDE * PATCH, "width": SIDE * PATCH},
    "do_pan_and_scan": None,
}


def judge_of(folder: Path) -> Gemma3Processor:
    """Opens transformers' processor."""
    images, tokenizer = AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    template = (folder / "chat_template.jinja").read_text()
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=(SIDE // MERGE) ** 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("gemma3"))


def write_gemma3(folder: Path) -> Path:
    """Writes tokenizer, template and processor as Gemma 3 is published."""
    write_folder(folder, Path(__file__).with_name("gemma3.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*TOKENS.values(), "<start_of_turn>", "<end_of_turn>", "<bos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "eos_token": "<end_of_turn>",
        "bos_token": "<bos>",
        **TOKENS,
        "extra_special_tokens": TOKENS,
    }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # Gemma's own class would replace the pieces of the file
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma3Processor", "image_seq_length": (SIDE // MERGE) ** 2})
    )
    return folder


def encoder_of(folder: Path, **limits: int) -> RecordEncoder:
    """Opens the folder as a run does."""
    section = SftSection.model_validate(
        {"kind": "sft", "seq_length": 64, "tokenizer": str(folder), "train": [{"path": "a"}]}
    )
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(TOKENS["image_token"])
    vision = VisionSection(
        kind="gemma3",
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=2,
        num_positions=SIDE**2,
        patch_size=PATCH,
        merge_size=MERGE,
        frames_per_patch=1,
        image_token=token,
    )
    images = ImageProcessor(folder, vision, ImagesSection.model_validate(limits))
    return RecordEncoder(section, load_tokenizer(folder), images)


def drawn(draw: random.Random, folder: Path) -> dict[str, Any]:
    """Draws a conversation of texts and images in any order."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": [{"type": "text", "text": "Be brief.\n"}]})
    for parts, answer in drawn_turns(draw, folder):
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return {"messages": messages}


@pytest.mark.parametrize("seed", range(8))
def test_a_conversation_is_that_of_transformers(seed: int, folder: Path, tmp_path: Path) -> None:
    judge = judge_of(folder)
    record = drawn(random.Random(seed), tmp_path)
    expected = judge.apply_chat_template(record["messages"], tokenize=True, return_dict=True, return_tensors="pt")
    encoder = encoder_of(folder)
    sample = encoder.encode(record, tmp_path)
    assert sample.ids.tolist() == expected["input_ids"][0].tolist()
    assert not sample.loss_weights[expected["token_type_ids"][0].numpy() == 1].any()
    found = list(sample.images)
    pixels = expected.get("pixel_values", [])
    assert len(found) == len(pixels)
    for image, theirs in zip(found, pixels, strict=True):
        assert image.grid == (1, SIDE, SIDE)
        patches = encoder_processor(encoder).patches(image.content).pixels
        for number, patch in enumerate(patches):
            top, left = PATCH * (number // SIDE), PATCH * (number % SIDE)
            np.testing.assert_array_equal(
                patch.reshape(3, PATCH, PATCH), theirs[:, top : top + PATCH, left : left + PATCH].numpy()
            )


def encoder_processor(encoder: RecordEncoder) -> ImageProcessor:
    assert encoder._images is not None
    return encoder._images


def test_what_transformers_would_read_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(random.Random(1)))
    image = {"type": "image", "path": "a.png"}
    text = {"type": "text", "text": "a <start_of_image>"}
    answer = {"role": "assistant", "content": "A cat."}
    with refuses(DataError, "<start_of_image>"):
        encoder_of(folder).encode({"messages": [{"role": "user", "content": [image, text]}, answer]}, tmp_path)
    asked = {"messages": [{"role": "user", "content": [image]}, answer]}
    with refuses(DataError, "data.images.min_pixels"):
        encoder_of(folder, max_pixels=100).encode(asked, tmp_path)
    processors: dict[str, dict[str, Any]] = {
        "crops": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 2, "pan_and_scan_max_num_crops": 4}
        | {"pan_and_scan_min_ratio_to_activate": 1.0},
        "model.vision needs": {"size": {"height": 20, "width": 20}},
    }
    for name, changes in processors.items():
        other = tmp_path / name
        other.mkdir()
        for file in folder.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        (other / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | changes))
        with refuses(DataError, name):
            encoder_of(other).encode(asked, tmp_path)
    (tmp_path / name / "tokenizer_config.json").write_text("{}")
    with refuses(DataError, "boi_token"):
        encoder_of(tmp_path / name)
