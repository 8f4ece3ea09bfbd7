"""Cores of delta nets and Mamba-2 are those of whole rows, one token after the other in float64, on any ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtrain.arch.layout import Layout
from mtrain.config.schema.layout import CpComm
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.recurrent.core import Heads
from tests.core.model.attention import delta_net_ranks
from tests.core.model.attention.delta_net_ranks import Found, Whole
from tests.core.model.attention.recurrence import (
    KERNEL,
    KEY_DIM,
    VALUE_DIM,
    Documents,
    Inputs,
    convolved,
    one_by_one,
    starts_of,
)
from tests.pool import Pool

SEQ = 24
DOCUMENTS: Documents = [[24], [1, 4, 8, 11], [5, 7, 1, 1, 10], [12, 12]]
"""Edges lie on those of parts, which have three tokens at cp=4, within them, and next to each other."""
PASSED_STATES = (["allgather_base"] * 2, ["reduce_scatter_base"] * 2)
EXCHANGED_HEADS = (["alltoall_base"] * 3, ["alltoall_base"] * 3)


def drawn(heads: Heads, is_mamba: bool = False) -> Whole:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    tokens, values = (SEQ, len(DOCUMENTS)), heads.value_heads
    return Whole(
        mixed=draw(*tokens, heads.key_heads * heads.channels),
        weight=draw(heads.key_heads * heads.channels, KERNEL),
        log_decay=-draw(*tokens, values).exp() / 4,
        beta=draw(*tokens, values).sigmoid(),
        gradient=draw(*tokens, values * heads.value_dim),
        bias=draw(heads.key_heads * heads.channels) if is_mamba else None,
        skip=draw(values) if is_mamba else None,
    )


def expected(heads: Heads, whole: Whole, starts: Tensor | None) -> list[Tensor]:
    """Returns the output and the gradients of mixed, log_decay, beta, weight, and of bias and skip if there are any."""
    given = (whole.mixed, whole.log_decay, whole.beta, whole.weight, whole.bias, whole.skip)
    leaves = [part.clone().requires_grad_() for part in given if part is not None]
    mixed, log_decay, beta, weight, *further = leaves
    zeros = torch.zeros(KERNEL - 1, *mixed.shape[1:], dtype=torch.float64)
    smooth, _ = convolved(mixed, weight, zeros, starts, *further[:1])
    shared = heads.value_heads // heads.key_heads
    groups = smooth.view(*mixed.shape[:2], heads.key_heads, -1)
    query, key = groups[..., :KEY_DIM], groups[..., KEY_DIM : 2 * KEY_DIM]
    values = groups[..., 2 * KEY_DIM :].reshape(*mixed.shape[:2], heads.key_heads * shared, VALUE_DIM)
    state = torch.zeros(mixed.shape[1], heads.value_heads, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    output, _ = one_by_one(Inputs(query, key, values, log_decay, beta, state), starts, corrects=not further)
    if further:
        output = output + further[1][:, None] * values
    output = output.flatten(2)
    return [output.detach(), *torch.autograd.grad(output, leaves, whole.gradient)]


def assert_is_that_of_whole_rows(found: list[Found], exact: list[Tensor]) -> None:
    cp = len(found)
    for rank, part in enumerate(found):
        own = zigzag_index(SEQ, cp, rank) if cp > 1 else torch.arange(SEQ)
        of_tokens = (part.output, part.mixed, part.log_decay, part.beta)
        for each, whole in zip(of_tokens, exact[:4], strict=True):
            torch.testing.assert_close(each, whole[own], rtol=1e-10, atol=1e-10)
    for parts, whole in zip(zip(*(part.parameters for part in found)), exact[4:], strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-10, atol=1e-10)


PASSES: list[tuple[bool, list[tuple[int, int, int]]]] = [
    # of prompts; sequence, start and end of each piece
    (True, [(0, 0, 9), (2, 0, 1), (1, 0, 4)]),
    (False, [(0, 9, 10), (1, 4, 5), (2, 1, 2)]),
    (False, [(2, 2, 3), (1, 5, 6)]),
    (True, [(3, 0, 2), (0, 0, 5)]),
    (False, [(3, 2, 3), (0, 5, 6), (1, 6, 7), (2, 3, 4)]),
]
"""The second sequence to begin in place 0 is the same text anew."""
CASES = [
    # cp, cp_comm, key heads, chunk
    (1, "allgather", 2, 4),
    (2, "allgather", 3, 4),
    (2, "ulysses", 2, 5),
    (4, "allgather", 1, 2),
    (4, "ulysses", 4, 7),
    # states are passed as above, since cp does not divide the heads, or the kind has no exchange
    pytest.param(2, "ulysses", 3, 64, marks=pytest.mark.nightly),
    pytest.param(2, "ring", 2, 2, marks=pytest.mark.nightly),
    pytest.param(4, "ulysses", 2, 64, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(
    ("is_mamba", "has_documents"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["rows", "documents", "mamba-rows", "mamba-documents"],
)
@pytest.mark.parametrize(("cp", "cp_comm", "key_heads", "chunk"), CASES)
def test_rows_are_those_of_one_process(
    pool: Pool, cp: int, cp_comm: CpComm, key_heads: int, chunk: int, is_mamba: bool, has_documents: bool
) -> None:
    heads = Heads(key_heads, 2 * key_heads, KEY_DIM, VALUE_DIM)
    whole, starts = drawn(heads, is_mamba), starts_of(DOCUMENTS) if has_documents else None
    found = pool.run(delta_net_ranks.computed, Layout(cp=cp), heads, cp_comm, chunk, whole, starts)
    assert_is_that_of_whole_rows(found, expected(heads, whole, starts))


@pytest.mark.parametrize(("key_heads", "counts"), [(2, PASSED_STATES), (4, EXCHANGED_HEADS)])
@pytest.mark.nightly  # a number of the documentation; the values: above
def test_collectives_are_counted(pool: Pool, key_heads: int, counts: tuple[list[str], list[str]]) -> None:
    """Four ranks, since the two of a gloo group send and receive instead."""
    heads = Heads(key_heads, 2 * key_heads, KEY_DIM, VALUE_DIM)
    found = pool.run(delta_net_ranks.computed, Layout(cp=4), heads, "ulysses", 4, drawn(heads), starts_of(DOCUMENTS))
    assert [(part.forward, part.backward) for part in found] == [counts] * 4


@pytest.mark.parametrize("is_mamba", [False, True], ids=["delta", "mamba"])
def test_generation_continues_prompts_of_any_lengths(pool: Pool, is_mamba: bool) -> None:
    """Prompts are read together, then a token of each sequence at a time; some sequences end, and others begin."""
    heads = Heads(2, 4, KEY_DIM, VALUE_DIM)
    whole = drawn(heads, is_mamba)
    exact = expected(heads, whole, None)[0]
    (found,) = pool.run(delta_net_ranks.generated, Layout(), heads, whole, PASSES)
    for (_, pieces), output in zip(PASSES, found, strict=True):
        rows = torch.cat([exact[start:end, sequence] for sequence, start, end in pieces])
        torch.testing.assert_close(output[: len(rows)], rows, rtol=1e-10, atol=1e-10)
