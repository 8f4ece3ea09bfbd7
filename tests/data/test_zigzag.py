"""Cutting rows for context parallelism."""

import pytest
import torch

from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.zigzag import slice_for_context_parallel, zigzag_index, zigzag_index_on


def test_a_rank_owns_a_chunk_from_each_end() -> None:
    assert zigzag_index(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_index(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_position_has_one_owner_and_all_do_the_same_work(cp: int) -> None:
    parts = [zigzag_index(24, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert len({int(part.sum()) for part in parts}) == 1


def test_all_fields_are_cut_alike_and_document_starts_stay_whole() -> None:
    rows = torch.arange(16).reshape(2, 8)
    whole = Microbatch(
        tokens=rows,
        labels=rows + 100,
        positions=rows % 8,
        weights={"main": rows.float(), "z": rows.float() * 2},
        denominator_weights={"main": rows.double(), "z": rows.double() * 3},
        document_starts=torch.zeros(2, 8, dtype=torch.int32),
        is_padding=rows % 3 == 0,
    )
    part = slice_for_context_parallel(whole, 2, 1)
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part.labels, part.tokens + 100)
    assert torch.equal(part.positions, part.tokens % 8)
    assert torch.equal(part.weights["z"], part.tokens.float() * 2)
    assert torch.equal(part.denominator_weights["z"], part.tokens.double() * 3)
    assert part.is_padding is not None
    assert torch.equal(part.is_padding, part.tokens % 3 == 0)
    assert part.document_starts is whole.document_starts
    assert slice_for_context_parallel(whole, 1, 0) is whole


def test_the_index_is_brought_to_a_device_once() -> None:
    device = torch.device("cpu")
    index = zigzag_index_on(device, 16, 2, 1)
    assert zigzag_index_on(device, 16, 2, 1) is index
    assert torch.equal(index, zigzag_index(16, 2, 1))
    assert index is not zigzag_index_on(device, 16, 2, 0)
