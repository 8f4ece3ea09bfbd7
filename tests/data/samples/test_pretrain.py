"""Samples of running text."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from mtrain.base.errors import DataError
from mtrain.data.formats.megatron_indexed import Corpus
from mtrain.data.samples.pretrain import PretrainDataset
from tests.messages import refuses

WriteCorpus = Callable[[str, Sequence[Sequence[int]]], str]
DOCUMENTS = [[10, 11, 12], [], [20, 21], [30, 31, 32, 33, 34, 35], [40]]
"""Documents with 12 tokens in total."""


def windows(
    prefix: str, seq_length: int, isolate: bool = False, key: tuple[int, ...] | None = None, part: range = range(5)
) -> PretrainDataset:
    return PretrainDataset(Corpus(prefix, 1000), part, seq_length, isolate, key)


def test_validation_reads_every_window_once_in_file_order(write_corpus: WriteCorpus) -> None:
    held_out = windows(write_corpus("a", DOCUMENTS), seq_length=4)
    rows = [held_out.sample(0, index) for index in range(len(held_out))]
    assert [row.tokens.tolist() for row in rows] == [[10, 11, 12, 20], [21, 30, 31, 32], [33, 34, 35]]
    assert [row.labels.tolist() for row in rows] == [[11, 12, 20, 21], [30, 31, 32, 33], [34, 35, 40]]
    assert [row.mask.tolist() for row in rows] == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1]]
    assert held_out.widths(np.arange(3)).tolist() == [4, 4, 3]
    assert all(row.document_starts is None for row in rows)


@pytest.mark.parametrize("seq_length", range(2, 14))
def test_validation_predicts_every_token_but_the_first_once(write_corpus: WriteCorpus, seq_length: int) -> None:
    held_out = windows(write_corpus("a", DOCUMENTS), seq_length)
    rows = [held_out.sample(0, index) for index in range(len(held_out))]
    predicted = [label for row in rows for label, counts in zip(row.labels, row.mask, strict=True) if counts]
    assert predicted == [token for document in DOCUMENTS for token in document][1:]
    assert min(row.mask.sum() for row in rows) >= 1


def test_isolated_documents_start_again_and_predict_nothing_across_an_edge(write_corpus: WriteCorpus) -> None:
    held_out = windows(write_corpus("a", DOCUMENTS), seq_length=6, isolate=True)
    first, second = held_out.sample(0, 0), held_out.sample(0, 1)
    assert first.tokens.tolist() == [10, 11, 12, 20, 21, 30]
    assert first.document_starts is not None
    assert first.document_starts.tolist() == [0, 0, 0, 3, 3, 5]
    assert first.mask.tolist() == [1, 1, 0, 1, 0, 1]
    assert second.tokens.tolist() == [31, 32, 33, 34, 35]
    assert second.document_starts is not None
    assert second.document_starts.tolist() == [0, 0, 0, 0, 0]
    assert second.mask.tolist() == [1, 1, 1, 1, 0]


def test_an_edge_at_the_end_of_a_row_hides_its_last_label(write_corpus: WriteCorpus) -> None:
    row = windows(write_corpus("a", DOCUMENTS), seq_length=3, isolate=True).sample(0, 0)
    assert row.labels.tolist() == [11, 12, 20]
    assert row.mask.tolist() == [1, 1, 0]
    assert row.document_starts is not None
    assert row.document_starts.tolist() == [0, 0, 0]


def test_an_epoch_lays_whole_documents_end_to_end_in_a_new_order(write_corpus: WriteCorpus) -> None:
    documents = [[100 * number + place for place in range(number)] for number in range(1, 9)]
    training = windows(write_corpus("a", documents), seq_length=5, key=(1, 0), part=range(8))
    assert len(training) == 7  # 36 tokens: 35 labels
    streams = []
    for epoch in range(4):
        rows = [training.sample(epoch, index) for index in range(len(training))]
        stream = [int(rows[0].tokens[0]), *(int(label) for row in rows for label in row.labels)]
        assert all(row.tokens[1:].tolist() == row.labels[:-1].tolist() for row in rows)
        assert Counter(stream) == Counter(token for document in documents for token in document)
        text = ",".join(map(str, stream))
        assert all(",".join(map(str, document)) in text for document in documents)
        streams.append(text)
    assert len(set(streams)) == 4


def test_what_does_not_fill_a_window_is_left_out_of_the_epoch(write_corpus: WriteCorpus) -> None:
    training = windows(write_corpus("a", DOCUMENTS), seq_length=4, key=(1, 0))
    assert len(training) == 2  # 11 labels: 8 are used
    assert all(training.sample(epoch, index).mask.sum() == 4 for epoch in range(3) for index in range(2))


def test_samples_do_not_depend_on_what_was_read_before(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", DOCUMENTS)
    used, fresh = windows(prefix, 4, key=(1, 0)), windows(prefix, 4, key=(1, 0))
    for epoch in (5, 0, 7):
        used.sample(epoch, 1)
    assert np.array_equal(used.sample(3, 0).tokens, fresh.sample(3, 0).tokens)


def test_a_part_of_the_documents_is_read_alone(write_corpus: WriteCorpus) -> None:
    held_out = windows(write_corpus("a", DOCUMENTS), seq_length=4, part=range(2, 4))
    tokens = {int(token) for index in range(len(held_out)) for token in held_out.sample(0, index).tokens}
    assert tokens == {20, 21, 30, 31, 32, 33, 34}


def test_too_little_text_is_refused(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", DOCUMENTS)
    assert len(windows(prefix, seq_length=11, key=(1, 0))) == 1
    with refuses(DataError, "a.bin"):
        windows(prefix, seq_length=12, key=(1, 0))
    with refuses(DataError):
        windows(prefix, seq_length=12, part=range(4, 5))
