"""Samples with images: cuts leave images whole, and every piece has its own patches, features and positions."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.core.batch.sample import HERE, EncodedImage, Sample, TokenizedSample
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.entry import TokenCache
from mtrain.data.cache.opening import CacheOptions, token_cache
from mtrain.data.formats.record_files import record_files
from mtrain.data.samples.sft import RowLimit, SftDataset, TooLong
from mtrain.hf.images import ImageProcessor
from tests.data.images.cases import axes_of_transformers, picture, processor_of
from tests.messages import refuses

UNIT = 8
"""Pixels of a feature, in a row."""
Part = int | tuple[int, int]
PARTS = st.tuples(
    st.lists(st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(2, 4)), min_size=1, max_size=6),
    st.booleans(),
).map(lambda drawn: [1, *(piece for part in drawn[0] for piece in (part, 1))][: None if drawn[1] else -1])
"""Numbers of text tokens, and rows and columns of images, with text between them, and at the end of some samples."""


class PartsEncoder:
    """Encoder of `PARTS`: text tokens are numbered from 1, and the odd ones are trained."""

    fingerprint = "parts"

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor

    def encode(self, record: dict[str, Any], folder: Path = HERE) -> TokenizedSample:
        """Encodes one record."""
        ids, images = list[int](), list[EncodedImage]()
        for part in record["parts"]:
            if isinstance(part, int):
                ids += range(len(ids) + 1, len(ids) + 1 + part)
                continue
            rows, columns = part
            content = picture(random.Random(rows * 10 + columns), size=(columns * UNIT, rows * UNIT))
            images.append(EncodedImage(content, (1, 2 * rows, 2 * columns)))
            ids += [self._processor.image_token] * (rows * columns)
        values = np.array(ids, np.int32)
        weights = ((values % 2 == 1) & (values != self._processor.image_token)).astype(np.float32)
        return TokenizedSample(values, weights, images=tuple(images))


def cache_of(
    folder: Path, samples: list[list[Part]], processor: ImageProcessor, encoder: type[PartsEncoder] = PartsEncoder
) -> TokenCache:
    """Tokenises samples."""
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"parts": parts}) + "\n" for parts in samples))
    return token_cache(
        EncodingJob(tuple(record_files(str(path))), partial(encoder, processor)), "", CacheOptions(folder)
    )


def spans_of(parts: list[Part]) -> list[tuple[int, int]]:
    """Returns the first token and the end of each image."""
    sizes = [part if isinstance(part, int) else part[0] * part[1] for part in parts]
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for part, size, end in zip(parts, sizes, ends) if not isinstance(part, int)]


def check_piece(
    sample: Sample, start: int, record: TokenizedSample, spans: list[tuple[int, int]], processor: ImageProcessor
) -> None:
    """Checks the piece of a record that begins with the token `start`."""
    end, token = start + len(sample.tokens), processor.image_token
    assert sample.tokens.tolist() == record.ids[start:end].tolist()
    assert not sample.mask[sample.labels == token].any()
    assert not any(first < border < last for first, last in spans for border in (start, end)), "images are whole"
    own = [number for number, (first, last) in enumerate(spans) if start <= first and last <= end]
    if sample.images is None:
        assert not own
        return
    images, is_image = sample.images, sample.tokens == token
    assert images.grids.tolist() == [list(record.images[number].grid) for number in own]
    pixels = [processor.patches(record.images[number].content).pixels for number in own]
    assert np.array_equal(images.pixels, np.concatenate(pixels))
    assert images.places[is_image].tolist() == list(range(len(images.pixels) // 4))
    assert (images.places[~is_image] == -1).all()
    assert np.array_equal(images.axes, axes_of_transformers(sample.tokens, images.grids, token))


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(PARTS, min_size=1, max_size=3),
    seq_length=st.integers(12, 30),
    too_long=st.sampled_from(["end", "start", "split", "drop"]),
)
def test_no_cut_is_inside_an_image(
    samples: list[list[Part]],
    seq_length: int,
    too_long: TooLong,
    vision_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    processor = processor_of(vision_folder)
    cache = cache_of(tmp_path_factory.mktemp("cache"), samples, processor)
    largest = max((part[0] * part[1] for parts in samples for part in parts if not isinstance(part, int)), default=0)
    if too_long == "split" and largest > seq_length:
        return  # refused, below
    try:
        data = SftDataset(cache, range(len(cache)), RowLimit(seq_length, too_long, processor))
    except DataError:
        assert too_long == "drop"
        return
    predicted = {number: list[int]() for number in range(len(cache))}
    for index in range(len(data)):
        sample, number = data.sample(0, index), int(data._pieces.samples[index])
        record = cache.read(number)
        assert len(sample.tokens) <= seq_length
        assert data.widths(np.array([index]))[0] == max(1, len(sample.tokens))
        check_piece(sample, int(data._pieces.starts[index]), record, spans_of(samples[number]), processor)
        start, size = int(data._pieces.starts[index]), int(data._pieces.sizes[index])
        predicted[number] += range(start + 1, start + size)
        match too_long:
            case "end":
                cut = min(len(record.ids), seq_length + 1)
                missing = record.ids[size - 1 : cut - 1]
                assert start == 0
                assert (missing == processor.image_token).all(), "no more is lost than an image that is cut"
            case "start":
                missing = record.ids[max(0, len(record.ids) - seq_length - 1) : start]
                assert (record.ids[start + size :] == processor.image_token).all(), "an image at the end"
                assert (missing == processor.image_token).all()
            case "split" | "drop" | "refuse":
                assert start + size <= len(record.ids)
    for number, positions in predicted.items():
        assert len(set(positions)) == len(positions)
        if too_long == "split":
            record = cache.read(number)
            assert {int(each) for each in np.flatnonzero(record.loss_weights) if each} <= set(positions)


def test_an_image_longer_than_a_row_is_not_split(vision_folder: Path, tmp_path: Path) -> None:
    processor = processor_of(vision_folder)
    cache = cache_of(tmp_path, [[3], [2, (4, 4), 9]], processor)
    with refuses(DataError, "line 2", "16 tokens", "data.seq_length=15"):
        SftDataset(cache, range(2), RowLimit(15, "split", processor))
    assert len(SftDataset(cache, range(2), RowLimit(16, "split", processor))) == 3
    for too_long in ("end", "start", "drop"):
        SftDataset(cache, range(2), RowLimit(15, too_long, processor))
    with refuses(DataError, "line 2"):
        SftDataset(cache, range(2), RowLimit(15, "refuse", processor))


def test_other_processors_are_other_data(vision_folder: Path, tmp_path: Path) -> None:
    processor = processor_of(vision_folder)
    cache = cache_of(tmp_path, [[2, (2, 2), 9]], processor)
    prints = {
        SftDataset(cache, range(1), RowLimit(30, "end", each)).fingerprint
        for each in (processor, processor_of(vision_folder, {"max_pixels": 1599}))
    }
    assert len(prints) == 2


def test_another_grid_than_when_it_was_tokenised_is_refused(vision_folder: Path, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, [[2, (4, 4), 9]], processor_of(vision_folder))
    data = SftDataset(cache, range(1), RowLimit(30, "end", processor_of(vision_folder, {"max_pixels": 400})))
    with refuses(DataError, "line 1", "data.cache_dir"):
        data.sample(0, 0)
