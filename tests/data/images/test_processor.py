"""Token ids, patches, grids and positions of conversations with images, against transformers' own processor."""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.base.errors import DataError, MachineError
from tests.data.images.cases import MODES, PROCESSOR, JudgeOfImages, axes_of_transformers, picture, processor_of
from tests.data.images.conftest import MakeEncoder
from tests.fault_table import Notice
from tests.messages import refuses


def drawn_content(draw: random.Random, folder: Path, most: int = 3) -> list[dict[str, Any]]:
    """Draws texts and images, at least one part; images are files of all modes and sizes."""
    parts: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, most)):
        if draw.random() < 0.5:
            parts.append({"type": "text", "text": draw.choice(["What is this?", " and ", "Zürich\n", "🙂"])})
            continue
        path = folder / f"{draw.randrange(10**9)}.image"
        path.write_bytes(picture(draw, draw.choice(list(MODES))))
        parts.append({"type": "image", "path": str(path)})
    return parts


def drawn_conversation(draw: random.Random, folder: Path) -> list[dict[str, Any]]:
    """Draws turns of a user, tools and answers, with images in questions and in results of tools."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": draw.choice(["Be brief.", [{"type": "text", "text": "Be so."}]])})
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": drawn_content(draw, folder)})
        if draw.random() < 0.4:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": draw.choice("abc")}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages += [{"role": "tool", "content": drawn_content(draw, folder)} for _ in range(draw.randint(1, 2))]
        messages.append({"role": "assistant", "content": draw.choice(["A cat.", "Two\n\ndogs!", "<|image_pad|>"])})
    return messages


@pytest.mark.parametrize("seed", range(12))
def test_conversations_are_those_of_transformers(
    seed: int, encoder: MakeEncoder, judge: JudgeOfImages, vision_folder: Path, tmp_path: Path
) -> None:
    messages = drawn_conversation(random.Random(seed), tmp_path)
    has_literal = any(message["content"] == "<|image_pad|>" for message in messages)
    sample = encoder().encode({"messages": messages})
    processor = processor_of(vision_folder)
    if has_literal:  # which stays text here, and stands for an image there
        for message in messages:
            message["content"] = "A cat." if message["content"] == "<|image_pad|>" else message["content"]
        sample = encoder().encode({"messages": messages})
    expected = judge.apply_chat_template(messages, tokenize=True, return_dict=True)
    assert sample.ids.tolist() == expected["input_ids"][0]
    assert len(sample.images) == len(expected.get("image_grid_thw", ()))
    if not sample.images:
        return
    patches = [processor.patches(image.content) for image in sample.images]
    assert np.array_equal([each.grid for each in patches], expected["image_grid_thw"])
    assert np.array_equal([image.grid for image in sample.images], expected["image_grid_thw"])
    assert np.array_equal(np.concatenate([each.pixels for each in patches]), expected["pixel_values"])
    assert not sample.loss_weights[sample.ids == processor.image_token].any()
    axes = processor.axes(sample.ids, np.array([image.grid for image in sample.images]))
    assert np.array_equal(axes, axes_of_transformers(sample.ids, expected["image_grid_thw"], processor.image_token))


def test_the_answers_alone_are_in_the_loss(encoder: MakeEncoder, judge: JudgeOfImages, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture(random.Random(0)))
    parts = [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]
    sample = encoder().encode({"messages": messages}, tmp_path)
    assert judge.tokenizer.decode(sample.ids[sample.loss_weights > 0]) == "A cat.<|im_end|>"


@pytest.mark.parametrize(
    ("mode", "size"),
    [*((mode, (7, 5)) for mode in MODES), ("RGB", (1, 1)), ("L", (1, 1)), ("RGB", (1, 150)), ("RGBA", (300, 3))],
)
def test_odd_images_are_what_transformers_makes_of_them(
    mode: str, size: tuple[int, int], vision_folder: Path, judge: JudgeOfImages, tmp_path: Path
) -> None:
    content = picture(random.Random(1), mode, size)
    (tmp_path / "image").write_bytes(content)
    assert_same(vision_folder, judge, content, tmp_path / "image")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(
    orientation: int, vision_folder: Path, judge: JudgeOfImages, tmp_path: Path
) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = picture(random.Random(orientation), "RGB", (40, 8), exif=exif)
    (tmp_path / "image").write_bytes(content)
    assert_same(vision_folder, judge, content, tmp_path / "image")
    rows, columns = processor_of(vision_folder).patches(content).grid[1:]
    assert (rows > columns) == (orientation >= 5)


def test_the_first_frame_of_an_animation_is_read(vision_folder: Path, judge: JudgeOfImages, tmp_path: Path) -> None:
    import io

    from PIL import Image

    frames = [Image.open(io.BytesIO(picture(random.Random(seed), "P", (16, 16)))) for seed in range(3)]
    frames[0].save(tmp_path / "image", "GIF", save_all=True, append_images=frames[1:])
    assert_same(vision_folder, judge, (tmp_path / "image").read_bytes(), tmp_path / "image")


def assert_same(folder: Path, judge: JudgeOfImages, content: bytes, path: Path) -> None:
    """Compares the patches of an image with those of transformers' processor."""
    processor = processor_of(folder)
    processor.check(content)
    found = processor.patches(content)
    expected = judge.image_processor(judge.image_processor.fetch_images([str(path)]), return_tensors="np")
    assert np.array_equal(found.pixels, expected["pixel_values"])
    assert np.array_equal(found.grid, expected["image_grid_thw"][0])


def _with_16_bits() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(file, "PNG")
    return file.getvalue()


UNUSABLE = {
    "empty": b"",
    "a web page": b"<!doctype html><html></html>",
    "cut": picture(random.Random(0), "RGB", (50, 50))[:-200],
    "cut png": picture(random.Random(0), "RGBA", (50, 50))[:200],
    "16 bits": _with_16_bits(),
    "a program": picture(random.Random(0), "RGB", (9, 9), format="EPS"),
    "narrow": picture(random.Random(0), "RGB", (1, 300)),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_images_that_cannot_be_read_are_refused(name: str, encoder: MakeEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.image").write_bytes(UNUSABLE[name])
    content = [{"type": "text", "text": "Look:"}, {"type": "image", "path": "a.image"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "No."}]
    with refuses(DataError, "messages[0].content[1]: a.image"):
        encoder().encode({"messages": messages}, tmp_path)


ADVICE = ("replace it, or leave the record out", "scale it down", "save it as PNG", "convert it to 8 bits")
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "JPEG2000", "ICO")


def damaged(draw: random.Random) -> bytes:
    """Draws an image file that is cut, overwritten or has bytes of another file at its end, or is sound."""
    name = draw.choice(FORMATS)
    content = bytearray(
        picture(draw, "L" if name == "GIF" else "RGB", (draw.randint(9, 40), draw.randint(9, 40)), format=name)
    )
    match draw.choice(("cut", "overwritten", "longer", "sound")):
        case "cut":
            del content[draw.randrange(len(content)) :]
        case "overwritten":
            for _ in range(draw.randint(1, 9)):  # half of them in the header
                content[draw.randrange(draw.choice((len(content), min(64, len(content)))))] = draw.randrange(256)
        case "longer":
            content += draw.randbytes(draw.randint(1, 99))
        case _:
            pass
    return bytes(content)


@pytest.mark.fault(
    "input",
    "an image file that is cut, overwritten or longer than its image, in ten formats",
    happens="refused with record, part and reason, unless transformers reads it, and then its patches are the same",
    exit_code=3,
)
@pytest.mark.filterwarnings("ignore")  # of Pillow, on what it passes over in a file
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_image_is_refused_or_that_of_transformers(
    seed: int, vision_folder: Path, judge: JudgeOfImages, tmp_path: Path, notice: Notice
) -> None:
    draw, processor, refused, num_read = random.Random(seed), processor_of(vision_folder), list[DataError](), 0
    for _ in range(40):
        content = damaged(draw)
        (tmp_path / "image").write_bytes(content)
        try:
            with notice:
                processor.check(content)
                found = processor.patches(content)
        except DataError as fault:
            refused.append(fault)
            continue
        expected = judge.image_processor(
            judge.image_processor.fetch_images([str(tmp_path / "image")]), return_tensors="np"
        )
        assert np.array_equal(found.pixels, expected["pixel_values"])
        num_read += 1
    assert min(num_read, len(refused)) > 5
    for refusal in refused:
        assert refusal.exit_code == notice.exit_code
        assert str(refusal).endswith(ADVICE)
        assert "\n" not in str(refusal)


def test_an_image_of_too_many_pixels_is_refused(
    encoder: MakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1000)
    encoded = base64.b64encode(picture(random.Random(0), "L", (40, 40))).decode()
    messages = [{"role": "user", "content": [{"type": "image", "base64": encoded}]}]
    with refuses(DataError, "messages[0].content[0]", "1,000"):
        encoder().encode({"messages": [*messages, {"role": "assistant", "content": "No."}]}, tmp_path)


def test_limits_on_pixels_are_those_of_transformers(vision_folder: Path) -> None:
    from transformers import AutoImageProcessor

    content = picture(random.Random(0), "RGB", (50, 30))
    (vision_folder / "a.jpg").write_bytes(content)
    found = set()
    for limits in ({}, {"min_pixels": 1000}, {"max_pixels": 400}, {"min_pixels": 5000, "max_pixels": 6000}):
        there = {"shortest_edge": limits.get("min_pixels", 128), "longest_edge": limits.get("max_pixels", 1600)}
        processor = AutoImageProcessor.from_pretrained(vision_folder, size=there)
        expected = processor(processor.fetch_images([str(vision_folder / "a.jpg")]), return_tensors="np")
        ours = processor_of(vision_folder, limits)
        assert np.array_equal(ours.patches(content).pixels, expected["pixel_values"]), limits
        found.add((len(expected["pixel_values"]), ours.fingerprint))
    assert len(found) == 4
    with refuses(DataError, "min_pixels=3000", "1600"):
        processor_of(vision_folder, {"min_pixels": 3000}).patches(content)


def test_a_processor_says_whether_it_limits_areas(vision_folder: Path, tmp_path: Path) -> None:
    assert processor_of(vision_folder).limits_areas
    (tmp_path / "tokenizer.json").write_bytes((vision_folder / "tokenizer.json").read_bytes())
    assert not processor_of(tmp_path, image_token=1).limits_areas
    fixed = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fixed))
    assert not processor_of(tmp_path, image_token=1).limits_areas


@pytest.mark.parametrize("missing", ["Pillow", "transformers"])
def test_a_missing_package_is_named(missing: str, vision_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = processor_of(vision_folder)
    with monkeypatch.context() as without:
        if missing == "Pillow":
            without.setitem(sys.modules, "PIL", None)
        else:
            without.setattr("mtrain.hf.images.find_spec", lambda name: None)
        with refuses(MachineError, missing, "mtrain[vision]"):
            processor.check(b"")


def test_a_folder_without_a_processor_is_refused(tmp_path: Path, vision_folder: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((vision_folder / "tokenizer.json").read_bytes())
    with refuses(DataError, "preprocessor_config.json"):
        processor_of(tmp_path).patches(picture(random.Random(0)))


@pytest.mark.parametrize("changed", [{"merge_size": 3}, {"patch_size": 8}, {"frames_per_patch": 1}])
def test_a_processor_of_other_patches_is_refused(changed: dict[str, Any], vision_folder: Path) -> None:
    with refuses(DataError, "merge_size", "model.vision"):
        processor_of(vision_folder, **changed).patches(picture(random.Random(0)))


def test_the_fingerprint_follows_the_processor(
    vision_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((vision_folder / "tokenizer.json").read_bytes())
    prints = {processor_of(vision_folder).fingerprint, processor_of(vision_folder, image_token=1).fingerprint}
    for key, value in {
        "patch_size": 8,
        "image_mean": [0.1] * 3,
        "size": {"shortest_edge": 1, "longest_edge": 9},
    }.items():
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, key: value}))
        prints.add(processor_of(tmp_path).fingerprint)
    with monkeypatch.context() as other:
        other.setattr("mtrain.hf.images.find_spec", lambda name: name)  # torchvision, which resizes to other pixels
        prints.add(processor_of(vision_folder).fingerprint)
    assert len(prints) == 6
