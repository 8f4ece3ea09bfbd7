"""Preferences about images: answers share the images of their prompt, and cuts leave images whole."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import HERE, TokenizedSample
from mtrain.data.encoding.compared import PreferenceEncoder
from mtrain.data.samples.preference import PreferenceDataset
from mtrain.data.samples.sft import RowLimit, TooLong
from tests.data.images.cases import picture, processor_of
from tests.data.images.conftest import MakeEncoder
from tests.data.images.test_image_samples import PARTS, Part, PartsEncoder, cache_of, check_piece, spans_of
from tests.data.images.test_records import check_same
from tests.messages import refuses

PATHS = ["a.png", "b.png"]
USER = {
    "role": "user",
    "content": [
        {"type": "image", "path": "a.png"},
        {"type": "text", "text": "and "},
        {"type": "image", "path": "b.png"},
        {"type": "text", "text": "?"},
    ],
}
PLACED = {"role": "user", "content": "<image>and <image>?"}
CHOSEN, REJECTED = ({"role": "assistant", "content": text} for text in ("Two.", "Three cats."))
PAIRS: dict[str, dict[str, Any]] = {
    "parts": {"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]},
    "a column": {"prompt": [PLACED], "chosen": [CHOSEN], "rejected": [REJECTED], "images": PATHS},
    "answers that begin alike": {"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
    "both": {"chosen": [PLACED, CHOSEN], "rejected": [PLACED, REJECTED], "images": PATHS},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = random.Random(8)
    for path in PATHS:
        (tmp_path / path).write_bytes(picture(draw, size=(24, 16)))
    return tmp_path


@pytest.mark.parametrize("name", PAIRS)
def test_both_answers_have_the_images_of_the_prompt(name: str, encoder: MakeEncoder, folder: Path) -> None:
    found = PreferenceEncoder(encoder(), "pairs", frozenset()).encode(PAIRS[name], folder)
    for sample, answer in zip(found, (CHOSEN, REJECTED), strict=True):
        expected = encoder().encode({"messages": [USER, answer]}, folder)
        assert len(expected.images) == 2
        check_same(sample, expected)


@pytest.mark.parametrize("prompt", [{"prompt": [USER]}, {"prompt": [PLACED], "images": PATHS}], ids=["parts", "column"])
def test_an_answer_alone_has_the_images_of_its_prompt(
    prompt: dict[str, Any], encoder: MakeEncoder, folder: Path
) -> None:
    record = {**prompt, "completion": [CHOSEN], "label": False}
    (found,) = PreferenceEncoder(encoder(), "answers", frozenset()).encode(record, folder)
    check_same(found, encoder().encode({"messages": [USER, CHOSEN]}, folder))
    assert found.weight == -1


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an image in an answer": (
        {"prompt": [USER], "chosen": [CHOSEN], "rejected": [{**USER, "role": "assistant"}]},
        ("'rejected'", "prompt"),
    ),
    "a placeholder in an answer": (
        {
            "prompt": [PLACED],
            "chosen": [{"role": "assistant", "content": "<image>"}],
            "rejected": [{"role": "assistant", "content": "a <image>"}],
            "images": [*PATHS, "a.png"],
        },
        ("'chosen'", "prompt"),
    ),
    "more images than places": (PAIRS["a column"] | {"images": PATHS[:1]}, ("1 image(s)", "2 placeholder(s)")),
    "texts": ({"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": PATHS[:1]}, ("'images'", "messages")),
    "a token without an image": ({"prompt": "<|image_pad|>?", "chosen": "a", "rejected": "b"}, ("image token",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_images_of_a_pair_that_cannot_be_read_are_refused(name: str, encoder: MakeEncoder, folder: Path) -> None:
    record, facts = REFUSED[name]
    with refuses(DataError, *facts):
        PreferenceEncoder(encoder(special_tokens_in_text=True), "pairs", frozenset()).encode(record, folder)


class PromptEncoder(PartsEncoder):
    """Encoder of `PARTS` whose answer is the last token."""

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes one record."""
        sample = super().encode(record, folder)
        sample.loss_weights[:] = np.arange(len(sample.ids)) == len(sample.ids) - 1
        return sample


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(PARTS, min_size=2, max_size=4).filter(lambda samples: len(samples) % 2 == 0),
    seq_length=st.integers(12, 30),
    too_long=st.sampled_from(["end", "start", "drop"]),
    compares=st.sampled_from(["pairs", "answers"]),
)
def test_no_cut_of_a_pair_is_inside_an_image(
    samples: list[list[Part]],
    seq_length: int,
    too_long: TooLong,
    compares: Literal["pairs", "answers"],
    vision_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    samples = [[*parts, 1] for parts in samples]  # the answer, which has no image
    processor = processor_of(vision_folder)
    cache = cache_of(tmp_path_factory.mktemp("cache"), samples, processor, PromptEncoder)
    records = [cache.read(number) for number in range(len(samples))]
    count = len(samples) // (2 if compares == "pairs" else 1)
    try:
        data = PreferenceDataset(cache, range(count), RowLimit(seq_length, too_long, processor), compares)
    except DataError:
        assert too_long == "drop"
        return
    for index in range(len(data)):
        group, second = divmod(index, 2)
        number = int(data._groups[group])
        record, spans = records[number], spans_of(samples[number])
        if compares == "pairs":
            record, spans = records[2 * number + second], spans_of(samples[2 * number + second])
        elif second:
            other = records[(number + count // 2) % count]
            record = TokenizedSample(
                np.append(record.ids[:-1], other.ids[-1:]), record.loss_weights, images=record.images
            )
        most, borders = seq_length + 1, [each for each in range(len(record.ids)) if not inside(each, spans)]
        start, end = 0, len(record.ids) - 1
        if len(record.ids) > most and too_long == "start":
            start = min(each for each in borders if each >= len(record.ids) - most)
        elif len(record.ids) > most:
            end = max(each for each in borders if each <= seq_length)
        sample = data.sample(0, index)
        assert data.widths(np.array([index]))[0] == max(1, end - start) == max(1, len(sample.tokens))
        if end > start:
            check_piece(sample, start, record, spans, processor)
            shown = [
                image.content for image, (first, last) in zip(record.images, spans) if start <= first < last <= end
            ]
            assert [image.content for image in data.images(index)] == shown


def inside(border: int, spans: list[tuple[int, int]]) -> bool:
    """Says whether a border is between two tokens of an image."""
    return any(first < border < last for first, last in spans)


def test_pairs_of_other_processors_are_other_data(vision_folder: Path, tmp_path: Path) -> None:
    processor = processor_of(vision_folder)
    cache = cache_of(tmp_path, [[2, (2, 2), 9], [2, (2, 2), 8]], processor)
    limits = map(partial(RowLimit, 30, "end"), (processor, processor_of(vision_folder, {"max_pixels": 1599})))
    assert len({PreferenceDataset(cache, range(1), limit, "pairs").fingerprint for limit in limits}) == 2
