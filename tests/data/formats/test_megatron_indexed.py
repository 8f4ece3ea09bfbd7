"""Tokenised corpora: the format, and messages about damaged ones."""

import contextlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from mtrain.base.errors import DataError
from mtrain.data.formats.megatron_indexed import Corpus, document_ranges, same_fingerprint, writing_corpus
from tests.messages import refuses

WriteCorpus = Callable[[str, Sequence[Sequence[int]]], str]
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8]]


def test_megatron_reads_what_is_written(write_corpus: WriteCorpus) -> None:
    dataset = IndexedDataset(write_corpus("ours", DOCUMENTS))
    assert [dataset[i].tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_documents_of_several_sequences_are_read_as_one(tmp_path: Path) -> None:
    """Megatron's own tools write such documents when they split sentences."""
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(np.array([1, 2, 3, 4, 5]), [2, 0, 3])
    builder.add_document(np.array([6]), [1])
    builder.finalize(str(tmp_path / "theirs.idx"))
    corpus = Corpus(str(tmp_path / "theirs"), vocab_size=10)
    assert corpus.document_lengths.tolist() == [5, 1]
    pieces = {(offset, length): corpus.read(0, offset, length).tolist() for offset, length in [(0, 5), (1, 2), (3, 2)]}
    assert pieces == {(0, 5): [1, 2, 3, 4, 5], (1, 2): [2, 3], (3, 2): [4, 5]}
    assert corpus.read(1, 0, 1).tolist() == [6]


@pytest.mark.parametrize(("vocab_size", "element_bytes"), [(65499, 2), (65500, 4)])
def test_elements_are_as_small_as_the_vocabulary_allows(tmp_path: Path, vocab_size: int, element_bytes: int) -> None:
    with writing_corpus(str(tmp_path / "a"), vocab_size) as writer:
        writer.add(np.array([vocab_size - 1, 0]))
    assert (tmp_path / "a.bin").stat().st_size == 2 * element_bytes
    assert Corpus(str(tmp_path / "a"), vocab_size).read(0, 0, 2).tolist() == [vocab_size - 1, 0]


def _fail_to_write(prefix: str) -> None:
    with contextlib.suppress(KeyError), writing_corpus(prefix, 1000) as writer:
        writer.add(np.array([1]))
        raise KeyError


def test_a_pair_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    _fail_to_write(str(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []


def test_an_older_pair_stays_when_its_replacement_fails(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", DOCUMENTS)
    _fail_to_write(prefix)
    assert Corpus(prefix, 1000).document_lengths.tolist() == [3, 0, 1, 4]


def _edit(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_a_missing_file_is_named(write_corpus: WriteCorpus, ending: str) -> None:
    prefix = write_corpus("a", DOCUMENTS)
    Path(f"{prefix}.{ending}").unlink()
    with refuses(DataError, f"a.{ending}"):
        Corpus(prefix, 1000)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda idx, bin_: _edit(idx, 0, b"GARBAGE"), "a.idx"),
        (lambda idx, bin_: _edit(idx, 9, struct.pack("<Q", 2)), "a.idx"),
        (lambda idx, bin_: _edit(idx, 17, b"\x07"), "a.idx"),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:20]), "a.idx"),
        (
            lambda idx, bin_: idx.write_bytes(idx.read_bytes()[:-8]),
            "a.idx",
        ),
        (
            lambda idx, bin_: idx.write_bytes(idx.read_bytes() + b"x"),
            "a.idx",
        ),
        (lambda idx, bin_: idx.write_bytes(idx.read_bytes() + b"xxxx"), "a.idx"),
        (lambda idx, bin_: _edit(idx, 34, struct.pack("<i", 2)), "a.idx"),
        (lambda idx, bin_: _edit(idx, 34 + 48, struct.pack("<q", 1)), "a.idx"),
        (lambda idx, bin_: bin_.write_bytes(bin_.read_bytes()[:-2]), "a.bin"),
        (lambda idx, bin_: bin_.write_bytes(b""), "a.bin"),
    ],
)
def test_damage_is_reported_with_what_was_found_and_expected(
    write_corpus: WriteCorpus, damage: Callable[[Path, Path], object], fact: str
) -> None:
    prefix = write_corpus("a", DOCUMENTS)
    damage(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    with refuses(DataError, fact):
        Corpus(prefix, 1000)


def test_the_bin_of_another_corpus_is_refused(write_corpus: WriteCorpus) -> None:
    prefix, other = write_corpus("a", DOCUMENTS), write_corpus("b", [[1, 2]])
    Path(f"{other}.bin").replace(f"{prefix}.bin")
    with refuses(DataError, "a.bin", "a.idx"):
        Corpus(prefix, 1000)


def test_a_corpus_without_documents_is_refused(write_corpus: WriteCorpus) -> None:
    with refuses(DataError, "a.idx"):
        Corpus(write_corpus("a", []), 1000)


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(write_corpus: WriteCorpus) -> None:
    corpus = Corpus(write_corpus("a", [[1, 2], [3, 77, 4]]), vocab_size=77)
    assert corpus.read(1, 2, 1).tolist() == [4]
    with refuses(DataError, "document 1", "a.bin", "model.vocab_size"):
        corpus.read(1, 0, 3)


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    with writing_corpus(str(tmp_path / "a"), 10**6) as writer:
        writer.add(np.array([-1, 2]))
    with refuses(DataError, "document 0"):
        Corpus(str(tmp_path / "a"), 10**6).read(0, 0, 2)


def test_the_fingerprint_tells_corpora_apart(write_corpus: WriteCorpus) -> None:
    one, same, other = (
        write_corpus(name, docs) for name, docs in [("a", [[1, 2]]), ("b", [[1, 2]]), ("c", [[1], [2]])]
    )
    assert Corpus(one, 1000).fingerprint == Corpus(same, 1000).fingerprint != Corpus(other, 1000).fingerprint


@pytest.mark.parametrize("total", [1, 7, 100])
@pytest.mark.parametrize("split", [(0.9, 0.1, 0.0), (1 / 3, 1 / 3, 1 / 3), (1.0, 0.0, 0.0)])
def test_a_split_cuts_documents_in_file_order_without_loss(total: int, split: tuple[float, float, float]) -> None:
    parts = document_ranges(total, split)
    assert [number for part in parts for number in part] == list(range(total))
    for part, share in zip(parts, split, strict=True):
        assert abs(len(part) - share * total) <= 1


def test_the_fingerprint_tells_tokens_apart_where_documents_are_alike(write_corpus: WriteCorpus) -> None:
    texts = {"one": 1, "last": 2}
    corpora = {name: write_corpus(name, [[1] * 40_000, [1] * 999 + [last]]) for name, last in texts.items()}
    one, last = (Corpus(prefix, 1000).fingerprint for prefix in corpora.values())
    assert one != last
    assert same_fingerprint(one, one)
    assert not same_fingerprint(one, last)
    assert same_fingerprint(f"2*{one.partition('~')[0]}-0-9-64", f"2*{one}-0-9-64"), "of version 0.1.0"
    assert not same_fingerprint(f"1*{one.partition('~')[0]}-0-9-64", f"2*{one}-0-9-64")
