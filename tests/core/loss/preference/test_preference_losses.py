"""Preference losses of groups in any order, with empty answers, and without any group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.config.schema.loss import PREFERENCE_LOSSES
from mtrain.core.loss.functions.load import load_loss_function
from mtrain.core.loss.preference.member import ROLES
from mtrain.core.loss.preference.scores import PreferenceValue, ScoredSequences
from tests.messages import refuses

Line = tuple[float, float, float, float, int, int]
"""(score, reference, length, weight, group, role) of a sequence."""


def scored(lines: list[Line]) -> ScoredSequences:
    columns = torch.tensor(lines, dtype=torch.float64).reshape(-1, 6).unbind(1)
    scores, reference, lengths, weights, groups, roles = columns
    return ScoredSequences(scores.requires_grad_(), reference, lengths, weights, groups.long(), roles.long())


def value_of(kind: str, sequences: ScoredSequences, **options: Any) -> tuple[PreferenceValue, torch.Tensor]:
    """Returns the value, and the derivative by each score."""
    loss: Any = load_loss_function(kind, options)
    value = loss(sequences)
    (derivative,) = torch.autograd.grad(value.numerator, sequences.scores, materialize_grads=True, allow_unused=True)
    return value, derivative


@st.composite
def batches(draw: st.DrawFn, kind: str) -> list[Line]:
    """Draws groups of two, some with an answer without loss tokens, some of weight 0, in any order."""
    lines: list[Line] = []
    for group in range(draw(st.integers(0, 5))):
        weight = draw(st.sampled_from([1.0, 0.25, 0.0]))
        roles = [0, 1]
        if PREFERENCE_LOSSES[kind].compares == "answers":
            roles = [draw(st.sampled_from([0, 1])), ROLES.index("mismatched")]
        for role in roles:
            length = draw(st.sampled_from([0.0, 1.0, 7.0]))
            score = -draw(st.floats(0.01, 30)) if length else 0.0
            lines.append((score, -draw(st.floats(0.01, 30)), length, weight, group, role))
    order = draw(st.permutations(range(len(lines))))
    return [lines[number] for number in order]


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
@settings(max_examples=40, deadline=None)
@given(drawn=st.data())
def test_groups_count_wherever_they_lie_and_empty_ones_nowhere(kind: str, drawn: st.DataObject) -> None:
    lines = drawn.draw(batches(kind))
    options = {"kl": False} if kind == "kto" else {}
    value, derivative = value_of(kind, scored(lines), **options)
    ordered = sorted(range(len(lines)), key=lambda number: (lines[number][4], lines[number][5]))
    empty = {line[4] for line in lines if line[5] < 2 and (line[2] == 0 or line[3] == 0)}
    whole = [number for number in ordered if lines[number][4] not in empty]
    if kind == "kto":
        whole = [number for number in whole if lines[number][5] < 2]
    again, wanted = value_of(kind, scored([lines[number] for number in whole]), **options)
    assert value.numerator.item() == pytest.approx(again.numerator.item(), rel=1e-12)
    assert value.shares.sum().item() == pytest.approx(again.shares.sum().item(), rel=1e-12)
    torch.testing.assert_close(derivative[whole], wanted, rtol=1e-12, atol=0)
    assert derivative.isfinite().all()
    assert derivative.abs().sum().item() == pytest.approx(wanted.abs().sum().item(), rel=1e-12), "others have none"
    for numerator, denominator in value.diagnostics.values():
        assert numerator.isfinite()
        assert denominator >= 0


@pytest.mark.parametrize("kind", PREFERENCE_LOSSES)
def test_derivatives_are_those_of_a_finite_difference(kind: str) -> None:
    """The baseline of kto is 0 here, so that the part held constant does not move."""
    second = 2 if PREFERENCE_LOSSES[kind].compares == "answers" else 1
    lines: list[Line] = [(-1.5, -2.0, 3.0, 1.0, 0, 0), (-4.0, -3.0, 2.0, 1.0, 0, second)]
    lines += [(-0.3, -0.9, 3.0, 0.5, 1, 0 if second == 1 else 1), (-0.2, -0.1, 2.0, 0.5, 1, second)]
    _, derivative = value_of(kind, scored(lines))
    for number, line in enumerate(lines):
        around = []
        for step in (1e-5, -1e-5):
            moved = [*lines]
            moved[number] = (line[0] + step, *line[1:])
            around.append(value_of(kind, scored(moved))[0].numerator.item())
        assert (around[0] - around[1]) / 2e-5 == pytest.approx(derivative[number].item(), rel=1e-6, abs=1e-8)


def test_the_baseline_of_kto_is_measured_and_no_gradient_flows_through_it() -> None:
    lines: list[Line] = [(-1.0, -2.0, 1.0, 1.0, 0, 0), (-1.0, -4.0, 1.0, 1.0, 0, 2)]
    value, derivative = value_of("kto", scored(lines), beta=0.5)
    assert value.diagnostics["kl"][0] == 3
    assert value.numerator.item() == pytest.approx(1 - 1 / (1 + 2.718281828459045**1.0), rel=1e-12)
    assert derivative[1] == 0
    with refuses(DataError):
        value_of("kto", scored(lines[:1]))
