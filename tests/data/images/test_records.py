"""Records with images in the forms of other programs: one conversation in each form gives one sample."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from mtrain.base.errors import DataError
from mtrain.config.schema.output import HeadOutput
from mtrain.core.batch.sample import TokenizedSample
from mtrain.data.encoding.compared import PreferenceEncoder, source_encoder
from mtrain.data.encoding.encoder import RecordEncoder
from mtrain.data.encoding.images import with_column
from mtrain.data.formats.record_files import chunks, record_files, record_without_nulls
from mtrain.hf.tokenizer.tokenizer import load_tokenizer
from tests.data.images.cases import TEMPLATE, JudgeOfImages, image_token, picture
from tests.data.images.conftest import MakeEncoder
from tests.messages import refuses

PICTURES = [picture(random.Random(seed), size=(20 + seed, 30)) for seed in range(2)]
ENCODED = [base64.b64encode(content).decode() for content in PICTURES]
ANSWER = {"role": "assistant", "content": "Two."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of the data, with two pictures below it."""
    (tmp_path / "pictures").mkdir()
    for number, content in enumerate(PICTURES):
        (tmp_path / "pictures" / f"{number}.jpg").write_bytes(content)
    return tmp_path


def asked(*sources: dict[str, Any], name: str = "image") -> dict[str, Any]:
    """Returns a conversation with two images in parts, whose sources are given."""
    first, second = ({"type": name, **source} for source in sources)
    question = [first, {"type": "text", "text": "\nand "}, second, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": question}, ANSWER]}


PATHS = ["pictures/0.jpg", "pictures/1.jpg"]
TEXT = "<image>\nand <image>?"
SAID = {"messages": [{"role": "user", "content": TEXT}, ANSWER]}
URLS = [f"data:image/jpeg;base64,{text}" for text in ENCODED]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "path": ("auto", asked(*({"path": path} for path in PATHS))),
    "image": ("auto", asked(*({"image": path} for path in PATHS))),
    "url": ("auto", asked(*({"url": path} for path in PATHS))),
    "base64": ("auto", asked(*({"base64": text} for text in ENCODED))),
    "base64 of lines": ("auto", asked(*({"base64": f"{text[:76]}\n{text[76:]}\n"} for text in ENCODED))),
    "data URL": ("auto", asked(*({"image": url} for url in URLS))),
    "a struct in a part": ("auto", asked({"image": {"path": PATHS[0]}}, {"image": {"bytes": ENCODED[1], "path": "b"}})),
    "OpenAI": ("auto", asked(*({"image_url": {"url": url}} for url in URLS), name="image_url")),
    "OpenAI with detail": (
        "auto",
        asked(*({"image_url": {"url": url, "detail": "auto"}} for url in URLS), name="image_url"),
    ),
    "OpenAI's URL alone": ("auto", asked(*({"image_url": url} for url in URLS), name="image_url")),
    "ms-swift": ("messages", {**SAID, "images": PATHS}),
    "datasets": (
        "messages",
        {**SAID, "images": [{"bytes": None, "path": PATHS[0]}, {"bytes": ENCODED[1], "path": None}]},
    ),
    "verl": (
        "auto",
        {"prompt": SAID["messages"][:1], "response": [ANSWER], "images": [{"image": path} for path in PATHS]},
    ),
    "TRL, axolotl": ("auto", {**asked({}, {}), "images": PATHS}),
    "one placeholder, one part": (
        "auto",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nand <image>?"}]},
                ANSWER,
            ],
            "images": PATHS,
        },
    ),
    "sharegpt": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": "Two."}], "images": PATHS},
    ),
    "alpaca": ("alpaca", {"instruction": "<image>", "input": "and <image>?", "output": "Two.", "images": PATHS}),
}


@pytest.fixture
def expected(encoder: MakeEncoder, folder: Path) -> TokenizedSample:
    """Returns the sample of the first form."""
    return encoder().encode(FORMS["path"][1], folder)


def check_same(found: TokenizedSample, expected: TokenizedSample) -> None:
    """Compares everything that training reads."""
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.loss_weights.tolist() == expected.loss_weights.tolist()
    assert [(image.content, image.grid) for image in found.images] == [
        (image.content, image.grid) for image in expected.images
    ]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_sample(
    name: str, encoder: MakeEncoder, folder: Path, expected: TokenizedSample
) -> None:
    form, record = FORMS[name]
    check_same(encoder(format=form).encode(record_without_nulls(json.loads(json.dumps(record))), folder), expected)
    assert [image.content for image in expected.images] == PICTURES


def as_structs(value: Any) -> Any:
    """Returns the value with bytes in place of base64 under the key `bytes`."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item) if key == "bytes" and item else as_structs(item) for key, item in value.items()
        }
    return [as_structs(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["path", "a struct in a part", "datasets", "ms-swift", "verl", "sharegpt"])
def test_a_table_gives_the_same_sample(
    name: str, encoder: MakeEncoder, folder: Path, expected: TokenizedSample
) -> None:
    form, record = FORMS[name]
    if any(isinstance(message["content"], list) for message in record.get("messages", ())):  # a column has one type
        answer = {**ANSWER, "content": [{"type": "text", "text": ANSWER["content"]}]}
        record = {"messages": [*record["messages"][:-1], answer]}
    parquet.write_table(pa.Table.from_pylist([as_structs(record)]), folder / "a.parquet")
    (chunk,) = chunks(record_files(str(folder / "a.parquet")))
    check_same(encoder(format=form).encode(chunk.record(0), folder), expected)


def test_a_single_image_needs_no_list(encoder: MakeEncoder, folder: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Two."}]
    one = encoder(format="sharegpt").encode({"conversations": turns, "image": PATHS[0]}, folder)
    check_same(one, encoder(format="sharegpt").encode({"conversations": turns, "images": PATHS[:1]}, folder))


def test_a_record_of_text_is_as_without_images(encoder: MakeEncoder, vision_folder: Path) -> None:
    record = {"messages": [{"role": "user", "content": "Hello <|image_pad|>"}, ANSWER]}
    section = encoder()._section
    plain = RecordEncoder(section, load_tokenizer(vision_folder)).encode(record)
    check_same(encoder().encode(record), plain)
    assert not (plain.ids == image_token(vision_folder)).any()


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    """Returns a conversation of these parts."""
    return {"messages": [{"role": "user", "content": [*given, {"type": "text", "text": "?"}]}, ANSWER]}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fewer images": ({**SAID, "images": PATHS[:1]}, ("1 image", "2 place")),
    "more images": ({**SAID, "images": [*PATHS, PATHS[0]]}, ("3 image", "2 place")),
    "no images": (SAID, ("0 image", "2 place")),
    "a part without an image": (parts({"type": "image"}), ("0 image", "1 place")),
    "two columns": ({**SAID, "images": PATHS, "image": PATHS[0]}, ("'images'", "'image'")),
    "http": (parts({"type": "image", "url": "https://a.test/b.png"}), ("https://a.test/b.png",)),
    "s3": ({**SAID, "images": ["s3://a/b.png", PATHS[0]]}, ("s3://a/b.png",)),
    "missing": (parts({"type": "image", "path": "none.png"}), ("messages[0].content[0]", "none.png")),
    "a folder": (parts({"type": "image", "path": "pictures"}), ("pictures",)),
    "no base64": (parts({"type": "image", "base64": "a b?"}), ("base64",)),
    "text in a data URL": (parts({"type": "image", "url": "data:image/svg+xml,<svg/>"}), ("data:image/svg+xml",)),
    "two sources": (parts({"type": "image", "path": PATHS[0], "base64": ENCODED[0]}), ("path", "base64")),
    "a number": (parts({"type": "image", "image": 7}), ("int",)),
    "another key": (parts({"type": "image", "path": PATHS[0], "max_pixels": 7}), ("max_pixels",)),
    "another detail": (parts({"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}}), ("detail",)),
    "a text that is none": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ["<image>"]}]}, ANSWER]},
        ("messages[0].content[0].text", "list"),
    ),
    "nested without end": (parts({"type": "image", "image": {"image": {"image": {}}}}), ("no image",)),
    "null": ({**SAID, "images": [None, PATHS[0]]}, ("NoneType",)),
    "video": (parts({"type": "video", "video": "a.mp4"}), ("video",)),
    "audio": (parts({"type": "input_audio", "input_audio": "a"}), ("input_audio",)),
    "a column of videos": ({**SAID, "videos": ["a.mp4"], "images": PATHS}, ("videos",)),
    "a system message": (
        {"messages": [{"role": "system", "content": [{"type": "image", "path": PATHS[0]}]}, *SAID["messages"][1:]]},
        ("1 image", "0 token"),
    ),
    "an answer": (
        {"messages": [{"role": "user", "content": "a"}, {**ANSWER, "content": [{"type": "image", "path": PATHS[0]}]}]},
        (),
    ),
    "a prompt": ({"prompt": "<image> a", "response": "b", "images": PATHS[:1]}, ("images",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_clear_is_refused(name: str, encoder: MakeEncoder, folder: Path) -> None:
    record, facts = REFUSED[name]
    with refuses(DataError, *facts):
        encoder().encode(record, folder)


def test_the_token_of_an_image_without_an_image_is_refused(encoder: MakeEncoder, vision_folder: Path) -> None:
    ids = [1, image_token(vision_folder), 2]
    with refuses(DataError, str(ids[1])):
        encoder(format="tokens").encode({"input_ids": ids, "loss_mask": [0, 0, 1]})
    with refuses(DataError, "1 token"):
        messages = [{"role": "user", "content": "<|image_pad|>"}, ANSWER]
        encoder(special_tokens_in_text=True).encode({"messages": messages})


def test_heads_and_models_of_text_refuse_images(encoder: MakeEncoder, folder: Path, vision_folder: Path) -> None:
    tokenizer, images = load_tokenizer(vision_folder), encoder()._images
    record = FORMS["path"][1]
    pair = {"prompt": record["messages"][:1], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "One."}]}
    section = encoder(format="preference")._section
    pairs = source_encoder(section, tokenizer, "pairs", HeadOutput(1), images=images)
    assert isinstance(pairs, PreferenceEncoder)
    with refuses(DataError, "model.vision"):
        pairs.encode(pair, folder)
    text_alone = source_encoder(encoder()._section, tokenizer, None)
    for record in (FORMS["path"][1], FORMS["ms-swift"][1]):
        with refuses(DataError, "model.vision"):
            text_alone.encode(record, folder)
    question = {"messages": FORMS["path"][1]["messages"][:1]}
    with refuses(DataError, "model.vision"):
        RecordEncoder(encoder()._section, tokenizer)._chat.prompt(question)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["path", "ms-swift"])
def test_a_prompt_is_the_beginning_of_its_sample(name: str, encoder: MakeEncoder, folder: Path) -> None:
    record = with_column(FORMS[name][1])
    sample = encoder().encode(record, folder)
    chat = encoder()._chat
    assert chat is not None
    prompt = chat.prompt({"messages": record["messages"][:-1]}, folder)
    assert prompt.ids == sample.ids[: len(prompt.ids)].tolist()
    assert sample.loss_weights[len(prompt.ids)] > 0
    assert [image.grid for image in prompt.images] == [image.grid for image in sample.images]


def test_images_of_an_answer_are_not_in_the_loss(
    encoder: MakeEncoder, folder: Path, vision_folder: Path, judge: JudgeOfImages
) -> None:
    shows = TEMPLATE.read_text().replace("render(message.content or '', false)", "render(message.content or '', true)")
    (folder / "shows.jinja").write_text(shows)
    parts = [{"type": "text", "text": "A"}, {"type": "image", "path": PATHS[0]}, {"type": "text", "text": "B"}]
    messages = [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": parts}]
    sample = encoder(chat_template=str(folder / "shows.jinja")).encode({"messages": messages}, folder)
    is_image = sample.ids == image_token(vision_folder)
    assert is_image.sum() > 2
    assert not sample.loss_weights[is_image].any()
    trained = sample.ids[sample.loss_weights > 0]
    assert judge.tokenizer.decode(trained) == "A<|vision_start|><|vision_end|>B<|im_end|>"


def test_an_image_takes_its_tokens(vision_folder: Path, expected: TokenizedSample) -> None:
    counts = [int(np.prod(image.grid)) // 4 for image in expected.images]
    assert int((expected.ids == image_token(vision_folder)).sum()) == sum(counts) > 2
