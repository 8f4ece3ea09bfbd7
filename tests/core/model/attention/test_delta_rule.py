"""Rules of delta nets and Mamba-2, and convolution, against one token after the other, and against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from mtrain.core.layers.attention import delta_net as delta
from mtrain.core.layers.attention import mamba
from mtrain.core.layers.attention.delta_net import delta_rule
from mtrain.core.layers.attention.recurrent import chunks
from mtrain.core.layers.attention.recurrent.core import causal_convolution
from tests.core.model.attention.recurrence import KERNEL, Documents, Inputs, convolved, inputs, one_by_one, starts_of


def applied(given: Inputs, starts: Tensor | None, chunk: int, corrects: bool = True) -> tuple[Tensor, Tensor]:
    if corrects:
        return delta_rule(given.tokens, starts, chunk, given.state)
    return chunks.applied(mamba.row_chunks(given.tokens, starts, chunk), given.value, given.state)


def with_gradients(found: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Returns outputs, last states and gradients of all leaves, for fixed gradients of both results."""
    generator = torch.Generator().manual_seed(99)
    gradients = [torch.randn(part.shape, dtype=torch.float64, generator=generator) for part in found]
    of_leaves = torch.autograd.grad(found, leaves, gradients, materialize_grads=True)
    return [*(part.detach() for part in found), *of_leaves]


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for part, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(part, whole, rtol=tolerance, atol=tolerance)


@st.composite
def rows_of_documents(draw: st.DrawFn) -> Documents:
    """Draws one to three rows of one length, cut into documents anywhere."""
    seq = draw(st.integers(1, 13))
    edges = draw(st.lists(st.sets(st.integers(1, seq - 1) if seq > 1 else st.nothing()), min_size=1, max_size=3))
    return [[end - start for start, end in zip([0, *sorted(row)], [*sorted(row), seq])] for row in edges]


@settings(max_examples=40, deadline=None)
@given(documents=rows_of_documents(), heads=st.sampled_from([(1, 1), (1, 2), (2, 2)]), data=st.data())
def test_rule_is_that_of_one_token_after_the_other(
    documents: Documents, heads: tuple[int, int], data: st.DataObject
) -> None:
    seq = sum(documents[0])
    chunk = data.draw(st.integers(1, seq + 1))
    # a start before the first token: the first document goes on from the state
    continues, corrects = data.draw(st.booleans()), data.draw(st.booleans())
    leaves = Inputs._make(part.requires_grad_() for part in inputs(seq, len(documents), *heads, seed=seq))
    starts = starts_of(documents)
    starts = torch.where(starts == 0, -3, starts) if continues else starts
    expected = with_gradients(one_by_one(leaves, starts, corrects), list(leaves))
    assert_same(with_gradients(applied(leaves, starts, chunk, corrects), list(leaves)), expected)


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "mamba"])
@pytest.mark.parametrize("chunk", range(1, 13))
def test_rule_of_a_single_document_needs_no_starts(chunk: int, corrects: bool) -> None:
    leaves = Inputs._make(part.requires_grad_() for part in inputs(12, 2, 2, 2))
    expected = with_gradients(one_by_one(leaves, None, corrects), list(leaves))
    assert_same(with_gradients(applied(leaves, None, chunk, corrects), list(leaves)), expected)


def test_state_begins_with_zeros() -> None:
    given = inputs(9, 2, 1, 2)
    found = delta_rule(given.tokens, None, 4)
    expected = one_by_one(given._replace(state=torch.zeros_like(given.state)), None)
    assert_same(list(found), list(expected))


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
def test_rule_is_that_of_transformers(theirs: Callable[..., Any]) -> None:
    """Both compute in float32; documents are separate calls there."""
    documents = [[70, 1, 60], [131]]
    given = Inputs._make(part.float() for part in inputs(131, 2, 2, 2))
    given = given._replace(state=torch.zeros_like(given.state))
    output, states = applied(given, starts_of(documents), 64)
    for row, lengths in enumerate(documents):
        end = 0
        for length in lengths:
            start, end = end, end + length
            own = [part[start:end, row].unsqueeze(0) for part in given[:5]]
            expected, last = theirs(*own, output_final_state=True, use_qk_l2norm_in_kernel=True)
            torch.testing.assert_close(output[start:end, row], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[row], last[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [delta.row_chunks, mamba.row_chunks], ids=["delta", "mamba"])
def test_a_state_that_is_dropped_at_the_edge_of_a_chunk_is_far_off(rule: Callable[..., chunks.Chunks]) -> None:
    given = inputs(12, 2, 1, 2)
    given = given._replace(log_decay=given.log_decay / 20)
    whole = rule(given.tokens, None, 4)
    sound, _ = chunks.applied(whole, given.value, None)
    faulty, _ = chunks.applied(whole._replace(reading=torch.zeros_like(whole.reading)), given.value, None)
    torch.testing.assert_close(sound[:4], faulty[:4], rtol=0, atol=0)
    assert float((sound - faulty)[4:].abs().max()) > 0.1


def test_rule_without_corrections_is_mamba2_of_transformers() -> None:
    """Transformers computes in float32, and adds the input times D; documents are separate calls there."""
    documents = [[70, 1, 60], [131]]
    given = Inputs._make(part.float() for part in inputs(131, 2, 2, 2))
    given = given._replace(state=torch.zeros_like(given.state))
    output, states = applied(given, starts_of(documents), 64, corrects=False)
    skip = torch.tensor([0.5, -1.0, 2.0, 0.0])
    output = output + skip[:, None] * given.value
    for row, lengths in enumerate(documents):
        end = 0
        for length in lengths:
            start, end = end, end + length
            query, key, value, log_decay, beta = (part[start:end, row].unsqueeze(0) for part in given[:5])
            # theirs multiplies values and rates by steps: both have been, so that any decays and steps can be tried
            expected, last = mamba2_chunk_scan(
                value * beta[..., None], torch.ones_like(beta), log_decay, key, query, 32, return_final_states=True
            )
            expected = expected + skip[:, None] * value
            torch.testing.assert_close(output[start:end, row], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[row], last[0].mT, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(documents=rows_of_documents(), continues=st.booleans(), has_starts=st.booleans())
def test_convolution_is_that_of_one_token_after_the_other(
    documents: Documents, continues: bool, has_starts: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    seq, rows, channels = sum(documents[0]), len(documents), 6
    leaves = [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((seq, rows, channels), (channels, KERNEL), (KERNEL - 1, rows, channels), (channels,))
    ]
    x, weight, state, bias = leaves
    starts = starts_of(documents) if has_starts else None
    if starts is not None and continues:
        starts = torch.where(starts == 0, -KERNEL, starts)
    expected = with_gradients(convolved(x, weight, state, starts, bias), leaves)
    assert_same(with_gradients(causal_convolution(x, state, weight, bias, starts), leaves), expected)


def test_convolution_is_torchs_and_begins_with_zeros() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 2, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(6, KERNEL, dtype=torch.float64, generator=generator)
    output, state = causal_convolution(x, None, weight)
    rows = functional.conv1d(functional.pad(x.permute(1, 2, 0), (KERNEL - 1, 0)), weight.unsqueeze(1), groups=6)
    torch.testing.assert_close(output, functional.silu(rows).permute(2, 0, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, x[-(KERNEL - 1) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_and_decay_are_float32(dtype: torch.dtype) -> None:
    """Over 600 tokens with weak decays, a decay rounded to bfloat16 or a state kept in it is off by far more."""
    drawn = Inputs._make(part.to(dtype) for part in inputs(600, 1, 1, 2))
    given = drawn._replace(
        log_decay=(inputs(600, 1, 1, 2).log_decay * 1e-3).float(), state=torch.zeros_like(drawn.state)
    )
    output, state = applied(given, None, 64)
    expected, last = one_by_one(Inputs._make(part.double() for part in given), None)
    assert state.dtype == torch.float32
    assert output.dtype == dtype
    torch.testing.assert_close(state.double(), last, rtol=2e-5, atol=2e-5)
    # rounded once
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_weak_decays_keep_their_bits_after_a_strong_one() -> None:
    drawn = inputs(64, 1, 1, 1)
    log_decay = torch.full_like(drawn.log_decay, -1e-3)
    log_decay[:32] = -1000.0
    given = drawn._replace(log_decay=log_decay, state=torch.zeros_like(drawn.state))
    output, _ = applied(Inputs._make(part.float() for part in given), None, 64)
    expected, _ = one_by_one(given, None)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)
