"""Written pairs: the same bytes as megatron-core's builder writes."""

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mtrain.data.formats.megatron_indexed import element_type, writing_corpus


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_the_bytes_are_those_of_megatrons_builder(tmp_path: Path, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, size) for size in (5, 1, 0, 300)]
    theirs = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=element_type(vocab_size))
    for document in documents:
        theirs.add_document(document, [len(document)])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    with writing_corpus(str(tmp_path / "ours"), vocab_size) as writer:
        writer.add(documents[0])
        writer.add_all(np.concatenate(documents[1:]), [len(document) for document in documents[1:]])
    assert (writer.num_documents, writer.num_tokens) == (4, 306)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
