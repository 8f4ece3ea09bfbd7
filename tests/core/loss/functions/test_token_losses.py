"""The pairs of the next-token loss and the z-loss."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.core.loss.functions.divergence import distillation_loss, top_k_distillation_loss
from mtrain.core.loss.functions.likelihood import entropy_loss, next_token_loss, z_loss
from mtrain.core.loss.pair import LossPair, TermInputs, weigh
from tests.core.loss.microbatches import VOCAB, term_inputs, top_k_extras

LOSSES = [
    next_token_loss,
    functools.partial(next_token_loss, label_smoothing=0.1),
    z_loss,
    entropy_loss,
    distillation_loss,
    functools.partial(distillation_loss, direction="reverse", temperature=3.0),
    functools.partial(top_k_distillation_loss, k=3),
    functools.partial(top_k_distillation_loss, k=2, remainder="drop"),
]
REMAINDERS: tuple[Literal["bucket", "drop"], ...] = ("bucket", "drop")
WEIGHTS = torch.tensor([[1.0, 0.0, 0.5, 2.0], [0.0, 0.0, 0.25, 0.0]])


def test_next_token_loss_is_the_weighted_sum_of_cross_entropies() -> None:
    inputs = term_inputs(WEIGHTS)
    numerator, denominator = next_token_loss(inputs)
    logits = inputs.logits.local.double().permute(1, 2, 0)
    expected = (F.cross_entropy(logits, inputs.labels, reduction="none") * WEIGHTS).sum()
    assert numerator.item() == pytest.approx(expected.item(), rel=1e-6)
    assert denominator.item() == 3.75


def test_z_loss_is_the_weighted_sum_of_squared_partition_functions() -> None:
    inputs = term_inputs(WEIGHTS)
    numerator, denominator = z_loss(inputs)
    expected = (inputs.logits.local.double().logsumexp(-1).t().square() * WEIGHTS).sum()
    assert numerator.item() == pytest.approx(expected.item(), rel=1e-6)
    assert denominator.item() == 3.75


def test_entropy_is_summed_by_weight() -> None:
    inputs = term_inputs(WEIGHTS)
    expected = torch.distributions.Categorical(logits=inputs.logits.local.double()).entropy().t() * WEIGHTS
    assert entropy_loss(inputs).numerator.item() == pytest.approx(expected.sum().item(), rel=1e-6)


def test_divergences_are_summed_by_weight() -> None:
    inputs = term_inputs(WEIGHTS)
    assert inputs.teacher is not None
    model, teacher = ((each.local.double() / 2).log_softmax(-1) for each in (inputs.logits, inputs.teacher))
    directions: tuple[Literal["forward", "reverse"], ...] = ("forward", "reverse")
    for direction in directions:
        first, second = (teacher, model) if direction == "forward" else (model, teacher)
        expected = (first.exp() * (first - second)).sum(-1).t() * WEIGHTS
        found = distillation_loss(inputs, direction=direction, temperature=2.0).numerator
        assert found.item() == pytest.approx(expected.sum().item(), rel=1e-6)


def test_all_tokens_of_a_teacher_are_its_distribution() -> None:
    inputs = term_inputs(WEIGHTS, top_k=VOCAB)
    exact = distillation_loss(inputs).numerator
    (wanted,) = torch.autograd.grad(exact, inputs.logits.local)
    for remainder in REMAINDERS:
        found = top_k_distillation_loss(inputs, k=VOCAB, remainder=remainder).numerator
        assert found.item() == pytest.approx(exact.item(), rel=1e-5)
        torch.testing.assert_close(torch.autograd.grad(found, inputs.logits.local)[0], wanted)


def test_a_model_that_is_the_teacher_has_nothing_to_learn_unless_the_rest_is_dropped() -> None:
    inputs = term_inputs(WEIGHTS)
    inputs = replace(inputs, extras=top_k_extras(inputs.logits.local.detach(), 3))
    bucket, drop = (top_k_distillation_loss(inputs, k=3, remainder=each).numerator for each in REMAINDERS)
    assert abs(bucket.item()) < 1e-6
    assert torch.autograd.grad(bucket, inputs.logits.local)[0].abs().max() < 1e-6
    assert drop.item() > 0.1
    assert torch.autograd.grad(drop, inputs.logits.local)[0].abs().max() > 0.01


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_is_a_float32_numerator_with_a_graph_and_a_float64_denominator_without(
    loss: Callable[[TermInputs], LossPair],
) -> None:
    numerator, denominator = loss(term_inputs(WEIGHTS))
    assert (numerator.dtype, numerator.shape, numerator.requires_grad) == (torch.float32, (), True)
    assert (denominator.dtype, denominator.shape, denominator.requires_grad) == (torch.float64, (), False)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_learn_is_exactly_zero_with_gradient_zero(loss: Callable[[TermInputs], LossPair]) -> None:
    inputs = term_inputs(torch.zeros(2, 4))
    numerator, denominator = loss(inputs)
    assert (numerator.item(), denominator.item()) == (0.0, 0.0)
    (gradient,) = torch.autograd.grad(numerator, inputs.logits.local)
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
def test_masked_infinities_do_not_leak(loss: Callable[[TermInputs], LossPair], bad: float) -> None:
    clean, spoiled = term_inputs(WEIGHTS), term_inputs(WEIGHTS)
    with torch.no_grad():
        spoiled.logits.local[1, 0] = bad
        spoiled.logits.local[0, 1, 3] = bad
    for inputs in (clean, spoiled):
        loss(inputs).numerator.backward()
    assert torch.equal(loss(spoiled).numerator, loss(clean).numerator)
    assert spoiled.logits.local.grad is not None
    assert clean.logits.local.grad is not None
    assert torch.equal(spoiled.logits.local.grad, clean.logits.local.grad)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_infinity_that_counts_is_not_hidden(loss: Callable[[TermInputs], LossPair]) -> None:
    inputs = term_inputs(WEIGHTS)
    with torch.no_grad():
        inputs.logits.local[0, 0] = float("nan")
    assert loss(inputs).numerator.isnan()


def test_labels_of_masked_tokens_may_be_anything() -> None:
    inputs = term_inputs(WEIGHTS)
    expected = next_token_loss(inputs).numerator
    inputs.labels[WEIGHTS == 0] = -100
    again = term_inputs(WEIGHTS)
    again.labels[WEIGHTS == 0] = VOCAB + 5
    assert torch.equal(next_token_loss(again).numerator, expected)


@given(
    counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=30),
    values=st.lists(st.floats(0, 20, width=32), min_size=30, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_pairs_of_the_parts_add_up_to_the_pair_of_the_whole(
    counts: list[int], values: list[float], cuts: list[int], order: object
) -> None:
    """Any cut of the tokens into microbatches, and any order of adding them, gives the same pair."""
    size = len(counts)
    inputs = term_inputs(torch.ones(1, size), denominator_weights=torch.tensor([counts], dtype=torch.float64))
    losses = torch.tensor([values[:size]])
    whole = weigh(losses, inputs)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [_part(losses, inputs, start, end) for start, end in itertools.pairwise(edges)]
    order.shuffle(parts)  # type: ignore[attr-defined]
    assert sum(part.denominator.item() for part in parts) == whole.denominator.item() == sum(counts)
    assert sum(part.numerator.item() for part in parts) == pytest.approx(whole.numerator.item(), rel=1e-5, abs=1e-6)


def _part(losses: torch.Tensor, inputs: TermInputs, start: int, end: int) -> LossPair:
    """Returns the pair of the tokens from `start` up to `end`, exclusive."""
    return weigh(
        losses[:, start:end],
        TermInputs(
            logits=inputs.logits,
            labels=inputs.labels[:, start:end],
            weights=inputs.weights[:, start:end],
            denominator_weights=inputs.denominator_weights[:, start:end],
            tokens=inputs.tokens[:, start:end],
        ),
    )
