"""Core attention in float64 against softmax(q k / sqrt(d)) v written out, whatever the ranks hold."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.core.batch.zigzag import zigzag_index
from tests.core.model.attention_ranks import attend, kernels
from tests.parity.cases import Case, case
from tests.pool import Pool

SEQ, ROWS, HEADS, DIM = 32, 3, 8, 4
EDGES: list[list[int]] = [[], [1, 5, 8, 16, 31], [3, 4, 13, 20, 27]]
CASES = [
    case(),
    case(cp=2),
    case(cp=4),
    case(cp=2, cp_comm="ulysses"),
    case(cp=4, cp_comm="ulysses"),
]


def visible(window: int | None, documents: bool) -> Tensor:
    """Returns [batch, query, key] bool: which keys a query sees."""
    place = torch.arange(SEQ)
    distance = place[:, None] - place[None, :]
    seen = (distance >= 0) & (distance < (SEQ if window is None else window))
    rows = [
        torch.bucketize(place, torch.tensor(row, dtype=torch.int64), right=True) if documents else torch.zeros(SEQ)
        for row in EDGES
    ]
    return torch.stack([seen & (row[:, None] == row[None, :]) for row in rows])


def expected(inputs: dict[str, Any], seen: Tensor) -> list[Any]:
    """Returns the output and the gradients of query, key and value."""
    query, key, value = (torch.from_numpy(inputs[name]).requires_grad_() for name in ("query", "key", "value"))
    repeats = HEADS // key.shape[2]
    keys, values = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) / math.sqrt(DIM)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    output = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), values)
    gradients = torch.autograd.grad(output, [query, key, value], torch.from_numpy(inputs["grad"]))
    return [tensor.detach().numpy() for tensor in (output, *gradients)]


def starts() -> Any:
    """Returns [batch, seq] the first token of each token's document."""
    whole = np.zeros((ROWS, SEQ), np.int32)
    for row, edges in zip(whole, EDGES, strict=True):
        row[edges] = edges
    return np.maximum.accumulate(whole, axis=1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8], ids="groups{}".format)
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("window", [None, 6], ids=["everything", "window"])
def test_attention_is_that_of_whole_rows(
    pool: Pool, case: Case, groups: int, documents: bool, window: int | None
) -> None:
    rng = np.random.default_rng(0)
    sizes = {"query": HEADS, "key": groups, "value": groups, "grad": HEADS}
    inputs = {name: rng.standard_normal((SEQ, ROWS, heads, DIM)) for name, heads in sizes.items()}
    config = case.config(model__num_query_groups=groups, model__sliding_window=window)
    parts = pool.run(attend, case.resolved(config), config, 1, inputs, starts() if documents else None)
    exact = expected(inputs, visible(window, documents))
    cp = len(parts)
    for rank, found in enumerate(parts):
        own = zigzag_index(SEQ, cp, rank).numpy() if cp > 1 else np.arange(SEQ)
        for part, whole in zip(found, exact, strict=True):
            np.testing.assert_allclose(part, whole[own], rtol=1e-10, atol=1e-12)


def test_whole_rows_are_not_copied_in_backward(pool: Pool) -> None:
    """The backward of a split into one part is a concatenation, and that of a slice of everything fills zeros."""
    inputs = {name: np.zeros((SEQ, ROWS, HEADS, DIM)) for name in ("query", "key", "value", "grad")}
    config = case().config(model__num_query_groups=HEADS)
    (names,) = pool.run(kernels, case().resolved(config), config, inputs)
    assert any(name.endswith("_backward") for name in names)
    assert not {"cat", "slice_backward"} & {*names}


@pytest.mark.parametrize(("cp", "groups"), [(2, 2), (4, 1), (4, 8)])
def test_attention_of_a_ring_is_that_of_whole_rows(pool: Pool, cp: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    sizes = {"query": HEADS, "key": groups, "value": groups, "grad": HEADS}
    inputs = {name: rng.standard_normal((SEQ, ROWS, heads, DIM)) for name, heads in sizes.items()}
    one = case(cp=cp, cp_comm="ring")
    config = one.config(model__num_query_groups=groups)
    exact = expected(inputs, visible(None, documents=False))
    for rank, found in enumerate(pool.run(attend, one.resolved(config), config, 1, inputs, None)):
        own = zigzag_index(SEQ, cp, rank).numpy()
        for part, whole in zip(found, exact, strict=True):
            np.testing.assert_allclose(part, whole[own], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("layer", "window"), [(1, 6), (2, None), (3, 6), (4, None)])
def test_every_second_layer_sees_everything(pool: Pool, layer: int, window: int | None) -> None:
    rng = np.random.default_rng(1)
    inputs = {name: rng.standard_normal((SEQ, ROWS, HEADS, DIM)) for name in ("query", "key", "value", "grad")}
    changes = {"model__num_query_groups": HEADS, "model__sliding_window": 6, "model__global_attention_every": 2}
    config = case().config(**changes)
    (found,) = pool.run(attend, case().resolved(config), config, layer, inputs, None)
    for part, whole in zip(found, expected(inputs, visible(window, documents=False)), strict=True):
        np.testing.assert_allclose(part, whole, rtol=1e-10, atol=1e-12)
