"""Samples that are longer than a row: what each policy keeps of them, and that all losses are counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.entry import TokenCache
from mtrain.data.cache.opening import CacheOptions, token_cache
from mtrain.data.formats.record_files import record_files
from mtrain.data.samples.sft import RowLimit, SftDataset, TooLong, TooLongCounts, pieces_of
from tests.data.cache.byte_encoder import ByteEncoder
from tests.messages import refuses

TEXTS = ["abCD", "abcdefG", "ABCDEFghijk", "abcdefghijklmN", "xyz", "a"]
"""Texts whose capital letters are trained; rows take five tokens, so that three samples are too long."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    folder = tmp_path_factory.mktemp("tokens")
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return token_cache(EncodingJob(tuple(record_files(str(path))), ByteEncoder), "", CacheOptions(folder))


def kept(cache: TokenCache, too_long: TooLong) -> list[str]:
    """Returns the tokens of each row."""
    pieces, _ = pieces_of(cache, range(len(cache)), 4, too_long)
    return [
        bytes(cache.read(int(sample)).ids[start : start + size].tolist()).decode()
        for sample, start, size in zip(pieces.samples, pieces.starts, pieces.sizes)
    ]


@pytest.mark.parametrize(
    ("too_long", "rows", "counts"),
    [
        ("end", ["abCD", "abcde", "ABCDE", "abcde", "xyz", "a"], TooLongCounts(3, 2 + 6 + 9, empty=2)),
        ("start", ["abCD", "cdefG", "ghijk", "jklmN", "xyz", "a"], TooLongCounts(3, 2 + 6 + 9, empty=1)),
        ("drop", ["abCD", "xyz", "a"], TooLongCounts(3, 7 + 11 + 14)),
        # efG overlaps by the e that abcde ends with; a piece that trains nothing is left out
        ("split", ["abCD", "efG", "ABCDE", "EFghi", "mN", "xyz", "a"], TooLongCounts(3, 0, 2 + 3 + 4, 1 + 1 + 3)),
    ],
)
def test_what_is_kept_and_what_is_lost(
    cache: TokenCache, too_long: TooLong, rows: list[str], counts: TooLongCounts
) -> None:
    assert kept(cache, too_long) == rows
    assert pieces_of(cache, range(len(cache)), 4, too_long)[1] == counts


def test_the_first_too_long_sample_is_refused_by_place_and_number(cache: TokenCache) -> None:
    with refuses(DataError, "line 2", "a.jsonl"):
        kept(cache, "refuse")
    assert len(pieces_of(cache, range(4, 6), 4, "refuse")[0]) == 2, "another part has none"


@given(
    seq_length=st.integers(2, 20),
    numbers=st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda pair: pair[0] < pair[1]),
)
def test_split_predicts_every_trained_token_once(cache: TokenCache, seq_length: int, numbers: tuple[int, int]) -> None:
    pieces, _ = pieces_of(cache, range(*numbers), seq_length, "split")
    assert (pieces.sizes <= seq_length + 1).all()
    predicted = [
        (int(sample), position)
        for sample, start, size in zip(pieces.samples, pieces.starts, pieces.sizes)
        for position in range(start + 1, start + size)
    ]
    assert len(set(predicted)) == len(predicted)
    trained = {
        (sample, position)
        for sample in range(*numbers)
        for position, letter in enumerate(TEXTS[sample])
        if letter.isupper() and position > 0
    }
    assert trained <= set(predicted)


def test_a_token_that_a_piece_only_reads_does_not_keep_it(tmp_path: Path) -> None:
    """E is predicted by the first piece; the second one begins with it and trains nothing."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abcdEfghi"}\n')
    job = EncodingJob(tuple(record_files(str(path))), ByteEncoder)
    assert kept(token_cache(job, "", CacheOptions(tmp_path)), "split") == ["abcdE"]


def test_pieces_are_samples_of_their_own(cache: TokenCache) -> None:
    rows = SftDataset(cache, range(len(cache)), RowLimit(4, "split"))
    assert len(rows) == 7
    assert rows.sample(0, 3).labels.tolist() == list(b"Fghi")
    assert rows.sample(0, 3).mask.tolist() == [1, 0, 0, 0], "E, which the piece begins with, was trained before"
    assert rows.location(3) == rows.location(2)
    assert rows.widths(np.arange(7)).tolist() == [3, 2, 4, 4, 1, 2, 1]
    (note,) = rows.notes()
    assert note.endswith("3 of 6 samples have more than 5 tokens: split into 9 pieces; in 5 no token is left to train")


def test_every_policy_is_other_data(cache: TokenCache) -> None:
    policies: list[TooLong] = ["end", "start", "drop", "split"]
    assert len({SftDataset(cache, range(6), RowLimit(4, each)).fingerprint for each in policies}) == 4
