"""Attention in which tokens of an image see each other both ways, against softmax(q k / sqrt(d)) v written out.

Images and documents are drawn: at the borders of rows, documents and context-parallel ranks, next to each other, of one
token, and rows without any.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.key_set import with_image_ends
from tests.core.model.attention_ranks import attend
from tests.core.model.test_attention import DIM, HEADS, ROWS, SEQ, expected
from tests.parity.cases import Case, case
from tests.pool import Pool

CASES = [
    case(),
    case(cp=2),
    case(cp=4),
    case(cp=2, cp_comm="ulysses"),
]
Run = tuple[int, int]


def drawn_row(rng: np.random.Generator) -> tuple[list[Run], list[Run]]:
    """Returns the documents of a row, and images inside them."""
    edges = sorted({0, SEQ, *rng.integers(1, SEQ, rng.integers(0, 4)).tolist()})
    documents = list(itertools.pairwise(edges))
    images = []
    for start, end in documents:
        place = start + int(rng.choice([0, 1, 3]))
        while place < end and rng.random() < 0.8:
            length = int(rng.integers(1, 10))
            images.append((place, min(end, place + length)))
            place += length + int(rng.choice([0, 0, 1, 4]))
    return documents, images


def seen(documents: list[Run], images: list[Run], window: int | None) -> torch.Tensor:
    """Returns [query, key] bool, one pair at a time."""

    def is_seen(query: int, key: int) -> bool:
        if not any(start <= query < end and start <= key < end for start, end in documents):
            return False
        if window is not None and query - key >= window:
            return False
        return key <= query or any(
            start <= query and key < end for start, end in images if start <= key and query < end
        )

    return torch.tensor([[is_seen(query, key) for key in range(SEQ)] for query in range(SEQ)])


def marks_of(rows: list[tuple[list[Run], list[Run]]]) -> tuple[Any, Any]:
    """Returns the start of each token's document, and the index after the last key that it sees; [batch, seq]."""
    starts, ends = np.zeros((len(rows), SEQ), np.int32), np.tile(np.arange(1, SEQ + 1, dtype=np.int32), (len(rows), 1))
    for number, (documents, images) in enumerate(rows):
        for start, end in documents:
            starts[number, start:end] = start
        for start, end in images:
            ends[number, start:end] = end
    return starts, ends


@pytest.mark.parametrize("one", CASES, ids=str)
@pytest.mark.parametrize("window", [None, 6], ids=["everything", "window"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_an_image_see_each_other_both_ways(pool: Pool, one: Case, window: int | None, seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    rows = [drawn_row(rng) for _ in range(ROWS - 1)] + [([(0, SEQ)], [])]
    if seed == 0:  # packed rows without edges between documents
        rows = [([(0, SEQ)], images) for _, images in rows]
    starts, ends = marks_of(rows)
    joined = with_image_ends(None if seed == 0 else torch.from_numpy(starts), torch.from_numpy(ends))
    assert joined is not None
    groups = [1, 2, 8][seed]
    sizes = {"query": HEADS, "key": groups, "value": groups, "grad": HEADS}
    inputs = {name: rng.standard_normal((SEQ, ROWS, heads, DIM)) for name, heads in sizes.items()}
    config = one.config(model__num_query_groups=groups, model__sliding_window=window)
    exact = expected(inputs, torch.stack([seen(*row, window) for row in rows]))
    parts = pool.run(attend, one.resolved(config), config, 1, inputs, joined.numpy())
    for rank, found in enumerate(parts):
        own = zigzag_index(SEQ, len(parts), rank).numpy() if len(parts) > 1 else np.arange(SEQ)
        for part, whole in zip(found, exact, strict=True):
            np.testing.assert_allclose(part, whole[own], rtol=1e-10, atol=1e-12)
