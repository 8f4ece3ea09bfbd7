"""Several terms of different denominators in one backward pass."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from mtrain.base.errors import ConfigError
from mtrain.config.schema.loss import (
    CONSUMING_LOSSES,
    LOSS_FUNCTIONS,
    MAIN_TERM,
    LossSection,
    SideTermSection,
    TeacherSection,
)
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.functions.load import is_consuming, load_loss_function
from mtrain.core.loss.objective import AnyLoss, Objective, power_of_two_near, side_term_factors
from mtrain.core.loss.pair import LossPair, TermInputs, TokenInputs, weigh
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from tests.core.loss import bad_losses
from tests.core.loss.microbatches import term_inputs
from tests.messages import refuses

Z_LOSS = SideTermSection(function="z_loss", coefficient=0.25)
SECTION = LossSection(side_terms={"z": Z_LOSS})


def with_other_weights(inputs: TermInputs, weights: torch.Tensor, shares: torch.Tensor) -> TermInputs:
    """Returns the same logits and labels, as a term with another aggregation sees them."""
    return TermInputs(inputs.logits, inputs.labels, weights.float(), shares.double(), inputs.tokens)


def test_one_backward_gives_each_term_its_own_denominator() -> None:
    """The sum over two microbatches, divided by the main denominator, is the gradient of the added means."""
    objective = Objective.from_config(SECTION)
    microbatches = []
    for seed, weights in enumerate([torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]])]):
        main = term_inputs(weights, seed=seed)
        first_token = torch.tensor([[1.0, 0.0, 0.0]])
        microbatches.append({MAIN_TERM: main, "z": with_other_weights(main, torch.full((1, 3), 0.5), 7 * first_token)})
    planned = {MAIN_TERM: 3.0, "z": 14.0}
    factors = side_term_factors(torch.tensor(list(planned.values()), dtype=torch.float64), objective.coefficients)

    leaves = [inputs[MAIN_TERM].logits.local for inputs in microbatches]
    pairs = [objective.pairs(inputs) for inputs in microbatches]
    scalar = torch.stack([objective.scalar(each, factors) for each in pairs]).sum()
    gradients = torch.autograd.grad(scalar, leaves, retain_graph=True)

    sums = {term: torch.stack([each[term].numerator for each in pairs]).sum() for term in planned}
    expected = sums[MAIN_TERM] / 3 + 0.25 * sums["z"] / 14
    for found, right in zip(gradients, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(found / planned[MAIN_TERM], right, rtol=1e-6, atol=1e-8)


def test_a_scaled_numerator_changes_exponents_only() -> None:
    objective = Objective.from_config(SECTION)
    inputs = term_inputs(torch.ones(2, 4))
    pairs = objective.pairs({MAIN_TERM: inputs, "z": inputs})
    (plain,) = torch.autograd.grad(
        objective.scalar(pairs, {"z": torch.tensor(0.3)}), inputs.logits.local, retain_graph=True
    )
    numerator_scale = power_of_two_near(torch.tensor(1 / 1000, dtype=torch.float64))
    (small,) = torch.autograd.grad(
        objective.scalar(pairs, {"z": torch.tensor(0.3)}, numerator_scale), inputs.logits.local
    )
    assert small.dtype == plain.dtype
    assert torch.equal(small / float(numerator_scale), plain)


def test_the_power_of_two_near_a_number() -> None:
    for number in (1 / 1000, 1.0, 3.0, 1.41, 1.42, 0.7, 0.71, 2.0**-20):
        assert power_of_two_near(torch.tensor(number, dtype=torch.float64)).item() == 2.0 ** round(math.log2(number))
    for number in (0.0, -8.0, math.inf, math.nan):
        assert power_of_two_near(torch.tensor(number, dtype=torch.float64)).item() == 1.0


def test_a_side_term_without_a_denominator_has_factor_0() -> None:
    coefficients = {MAIN_TERM: 1.0, "z": 0.5, "other": 2.0}
    for planned, factors in (([6.0, 0.0, 3.0], [0.0, 4.0]), ([0.0, 5.0, 3.0], [0.0, 0.0]), ([0.0, 0.0, 0.0], [0, 0])):
        found = side_term_factors(torch.tensor(planned, dtype=torch.float64), coefficients)
        assert list(found) == ["z", "other"]
        assert [factor.item() for factor in found.values()] == factors


@given(st.floats(1e-30, 1e30))
def test_the_nearest_power_of_two_is_exact_and_near(x: float) -> None:
    power = power_of_two_near(torch.tensor(x, dtype=torch.float64)).item()
    assert math.frexp(power)[0] == 0.5
    assert 2**-0.501 <= power / x <= 2**0.501


@pytest.mark.parametrize(
    "function",
    [
        "mean",
        "plain_tuple",
        "per_token",
        "low_precision",
        "counted_in_integers",
        "python_number",
        "differentiable_denominator",
        "without_a_graph",
    ],
)
def test_a_bad_loss_function_is_named_with_its_mistake(function: str) -> None:
    path = f"tests.core.loss.bad_losses:{function}"
    objective = Objective.from_config(LossSection(function=path))
    with refuses(ConfigError) as caught:
        objective.pairs({MAIN_TERM: term_inputs(torch.ones(2, 3))})
    assert path in str(caught.value)


def in_float32(inputs: TermInputs) -> LossPair:
    """Rounds its sum, as functions of users may."""
    pair = next_token_loss(inputs)
    return LossPair(pair.numerator.float(), pair.denominator)


@pytest.mark.parametrize("function", ["next_token", "tests.core.loss.test_objective:in_float32"])
def test_float64_is_summed_in_float64_unless_a_function_rounds(function: str) -> None:
    inputs = term_inputs(torch.full((2, 3), 1 / 3))
    wide = replace(
        inputs, logits=VocabParallelLogits(inputs.logits.local.detach().double().requires_grad_(), None, 0, 11)
    )
    objective = Objective.from_config(LossSection(function=function))
    numerator = objective.pairs({MAIN_TERM: wide})[MAIN_TERM].numerator
    logits, labels = wide.logits.local.transpose(0, 1), inputs.labels
    exact = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    exact = (exact * inputs.weights.flatten().double()).sum()
    assert (numerator.dtype == torch.float64) == (function == "next_token")
    torch.testing.assert_close(numerator.double(), exact, rtol=1e-14 if function == "next_token" else 1e-6, atol=0)
    scalar = objective.scalar({MAIN_TERM: LossPair(numerator, inputs.denominator_weights.sum())}, {})
    assert torch.autograd.grad(scalar, wide.logits.local)[0].dtype == torch.float64


def test_no_graph_is_asked_for_where_none_is_recorded() -> None:
    objective = Objective.from_config(LossSection(function="tests.core.loss.bad_losses:without_a_graph"))
    with torch.no_grad():
        pairs = objective.pairs({MAIN_TERM: term_inputs(torch.ones(2, 3))})
    assert isinstance(pairs[MAIN_TERM], LossPair)


TEACHER = TeacherSection(checkpoint="runs/teacher")
KL = SideTermSection(function="distillation")


def test_a_term_that_compares_with_a_teacher_is_refused_without_one() -> None:
    assert Objective.from_config(LossSection(side_terms={"kl": KL}, teacher=TEACHER)).teacher_terms == ["kl"]
    with refuses(ConfigError, "loss.teacher", "'kl'"):
        Objective.from_config(LossSection(side_terms={"kl": KL}))


def test_a_teacher_that_no_term_asks_for_is_refused() -> None:
    with refuses(ConfigError, "runs/teacher"):
        Objective.from_config(LossSection(side_terms={"z": Z_LOSS}, teacher=TEACHER))


def test_terms_with_other_denominators_are_distinguished_from_those_with_the_main_one() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"aggregation": "sum"},
        {"empty_sequences": "include"},
        {"coefficient": 5.0},
        {"options": {}},
    ]
    side_terms = {str(number): SideTermSection(**change) for number, change in enumerate(changes)}
    assert Objective.from_config(LossSection(side_terms=side_terms)).apart == {"1", "2"}


def test_a_function_without_the_mark_keeps_logits_whole_and_a_note_says_so() -> None:
    own = LossSection(function="tests.core.loss.bad_losses:per_token")
    objective = Objective.from_config(own)
    assert objective.whole_microbatch_terms == [MAIN_TERM]
    (note,) = objective.notes(own)
    assert "tests.core.loss.bad_losses:per_token (term 'main') is not marked" in note
    assert objective.notes(own.model_copy(update={"chunk_tokens": "whole"})) == []
    marked = Objective.from_config(SECTION)
    assert (marked.whole_microbatch_terms, marked.notes(SECTION)) == ([], [])
    with refuses(ConfigError, "chunk_tokens=8"):
        marked.with_main(bad_losses.without_a_graph, SECTION.model_copy(update={"chunk_tokens": 8}))


def focal(inputs: TermInputs, gamma: float = 2.0) -> LossPair:
    losses = inputs.logits.cross_entropy(inputs.labels)
    return weigh((1 - (-losses).exp()) ** gamma * losses, inputs)


def test_options_of_a_function_are_bound_like_those_of_a_name() -> None:
    objective, inputs = Objective.from_config(LossSection()), term_inputs(torch.ones(1, 3))
    given: list[tuple[AnyLoss | str, dict[str, float] | None]] = [
        (focal, {"gamma": 0.5}),
        (partial(focal, gamma=9.0), {"gamma": 0.5}),
        (partial(focal, gamma=0.5), None),
        (f"{__name__}:focal", {"gamma": 0.5}),
    ]
    found = {
        objective.with_main(loss, LossSection(), options).functions[MAIN_TERM](inputs).numerator.item()
        for loss, options in given
    }
    assert found == {focal(inputs, 0.5).numerator.item()}
    with refuses(ConfigError, "loss focal", "gama"):
        objective.with_main(focal, LossSection(), {"gama": 0.5})


def next_token_and_more(inputs: TermInputs) -> LossPair:
    return replace(next_token_loss(inputs), numerator=inputs.logits.entropy().sum())


def test_logits_are_consumed_by_a_single_cross_entropy_alone() -> None:
    """A second term, or a function of the user's own, may read the logits after the first call of cross_entropy."""
    objective = Objective.from_config(SECTION)
    assert objective.consumes_logits([MAIN_TERM])
    assert not objective.consumes_logits([MAIN_TERM, "z"])
    assert not objective.consumes_logits(["z"])
    options = {"topk_distillation": {"k": 4}}
    losses = {name: load_loss_function(name, options.get(name, {})) for name in LOSS_FUNCTIONS}
    assert {name for name, function in losses.items() if is_consuming(function)} == CONSUMING_LOSSES
    smoothed = objective.with_main("next_token", SECTION, {"label_smoothing": 0.1})
    assert smoothed.consumes_logits([MAIN_TERM])
    assert not objective.with_main(next_token_and_more, SECTION).consumes_logits([MAIN_TERM])


def test_a_few_tokens_know_nothing_of_their_sequences() -> None:
    whole = term_inputs(torch.ones(1, 3))
    few = TokenInputs(whole.logits, whole.labels, whole.weights, whole.denominator_weights, whole.tokens)
    for ask in (lambda: few.sequence_ids, lambda: few.sum_over_sequence(torch.ones(1, 3))):
        with refuses(ConfigError, "per_token"):
            ask()
