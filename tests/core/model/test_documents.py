"""One kernel for all documents of a microbatch, against attention written out.

The kernel is torch's own and needs a GPU. Where there is one it takes part; elsewhere a plain function with its
documented meaning replaces it, and shapes are checked by torch's own meta kernel.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.core_attention import attend_segments, is_varlen_usable
from mtrain.core.layers.attention.key_set import Segments, key_set
from tests.core.model.test_attention import DIM, HEADS, ROWS, SEQ, expected, starts, visible

GROUPS = 2


def plain_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Computes torch's varlen_attn by its documentation: the last query of each sequence is at its last key."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0, "causal"
    outputs = []
    for number in range(len(query_ends) - 1):
        own = query[query_ends[number] : query_ends[number + 1]]
        keys, values = (part[key_ends[number] : key_ends[number + 1]] for part in (key, value))
        assert len(own) <= longest_query
        assert len(keys) <= longest_key
        keys, values = (part.repeat_interleave(HEADS // key.shape[1], dim=1) for part in (keys, values))
        distance = torch.arange(len(keys) - len(own), len(keys))[:, None] - torch.arange(len(keys))
        seen = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(keys)))
        scores = (torch.einsum("qhd,khd->hqk", own, keys) * scale).masked_fill(~seen, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outputs)


def held(cp: int, rank: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Returns the positions that a rank holds, and the same as runs."""
    if cp == 1:
        return torch.arange(SEQ), [(0, SEQ)]
    chunk = SEQ // (2 * cp)
    places = [(index * chunk, (index + 1) * chunk) for index in (rank, 2 * cp - 1 - rank)]
    return zigzag_index(SEQ, cp, rank), places


def segments(runs: list[tuple[int, int]], device: torch.device, window: int | None = None) -> Segments:
    return key_set(torch.from_numpy(starts()), window).segments(runs, SEQ, device)


def parts(dim: int = DIM) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    sizes = {"query": HEADS, "key": GROUPS, "value": GROUPS, "grad": HEADS}
    return {name: rng.standard_normal((SEQ, ROWS, heads, dim)) for name, heads in sizes.items()}


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("window", [None, 6], ids=["everything", "window"])
def test_one_kernel_attends_inside_every_document(cp: int, rank: int, window: int | None) -> None:
    inputs = parts()
    own, runs = held(cp, rank)
    query, key, value = (torch.from_numpy(inputs[name]) for name in ("query", "key", "value"))
    of_runs = segments(runs, query.device, window)
    found = attend_segments(query[own], key, value, of_runs, 1 / math.sqrt(DIM), plain_kernel)
    exact = expected(inputs, visible(window, documents=True))[0]
    np.testing.assert_allclose(found.numpy(), exact[own.numpy()], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cp", [1, 2])
def test_torch_agrees_on_the_shapes(cp: int) -> None:
    """The kernel's own meta implementation judges the shapes, on tensors without data."""
    nowhere = torch.device("meta")
    own, runs = held(cp, 0)
    query = torch.empty(len(own), ROWS, HEADS, 16, dtype=torch.bfloat16, device=nowhere)
    key = torch.empty(SEQ, ROWS, GROUPS, 16, dtype=torch.bfloat16, device=nowhere)
    assert attend_segments(query, key, key, segments(runs, nowhere), 0.25).shape == query.shape


def test_keys_are_gathered_only_where_documents_are_cut() -> None:
    whole, cut = (segments(held(cp, 0)[1], torch.device("cpu")) for cp in (1, 2))
    assert whole.key_index is None
    assert cut.key_index is not None
    assert len(cut.key_index) == int(cut.key_ends[-1])


def test_the_kernel_is_taken_on_a_gpu_in_half_precision_and_is_right_there() -> None:
    """The kernel must not be used without a GPU; on one it is compared with attention written out."""
    query = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    assert not is_varlen_usable(query, query, query), "no GPU holds these"
    if not torch.cuda.is_available():
        return
    device, inputs = torch.device("cuda"), parts(dim=16)
    own, runs = held(2, 1)
    query, key, value = (
        torch.from_numpy(inputs[name]).to(device, torch.bfloat16) for name in ("query", "key", "value")
    )
    assert is_varlen_usable(query, key, value)
    assert not is_varlen_usable(query.float(), key.float(), value.float())
    found = attend_segments(query[own.to(device)], key, value, segments(runs, device), 1 / 4)
    rounded = [part.cpu().double() for part in (query[own.to(device)], key, value)]
    q, k, v = rounded
    exact = attend_segments(q, k, v, segments(runs, torch.device("cpu")), 1 / 4, plain_kernel)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-2, atol=2e-2)
