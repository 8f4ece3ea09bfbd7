"""Preference losses under a user's own loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtrain import Datum, GroupMember, StepResult
from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.fault_table import Notice
from tests.parity.cases import case
from tests.parity.compare import relative
from tests.parity.objectives.preferences import sequences
from tests.pool import Pool
from tests.training.preferences import preference_ranks


def data(kind: str) -> list[Datum]:
    return [
        Datum([*one.tokens.tolist(), int(one.labels[-1])], [0.0, *one.mask.tolist()], one.weight, member=one.member)
        for one in sequences(kind)
    ]


def config(kind: str, **changes: Any) -> Config:
    return case(2, num_layers=2).config(
        loss__function=kind, train__global_batch_size=2, optimizer__min_lr=0.0, metrics__tensorboard=False, **changes
    )


def test_two_calls_of_whole_pairs_are_one_and_pairs_are_distinguished(pool: Pool) -> None:
    """Results agree to the bit, except the loss: a sum over pairs like the diagnostics, added in another order."""
    whole, split = pool.run(preference_ranks.trained, Layout(dp=2), config("dpo"), data("dpo"), [12, 4])[0]
    for ours, theirs in zip(whole.steps, split.steps, strict=True):
        assert _sums_of_pairs(ours) == pytest.approx(_sums_of_pairs(theirs), rel=1e-12, abs=1e-12)
        assert _without_sums(ours) == _without_sums(theirs)
    first, second = whole.steps
    assert first.loss == pytest.approx(0.6931471805599453, abs=1e-6), "as likely as the reference: log 2"
    assert first.diagnostics["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert first.denominator == 8.25, "the weights of the pairs"
    assert second.loss < first.loss
    assert whole.evaluation.loss < second.loss
    assert whole.evaluation.diagnostics["reward_accuracy"] == 1
    assert whole.evaluation.diagnostics["reward_margin"] > second.diagnostics["reward_margin"] > 0


def _sums_of_pairs(step: StepResult) -> dict[str, float]:
    return {**step.diagnostics, "loss": step.loss, "objective": step.objective}


def _without_sums(step: StepResult) -> StepResult:
    return replace(step, diagnostics={}, loss=0.0, objective=0.0)


@pytest.mark.nightly  # the day shows packed pairs by a reward model, in test_head_runs.py
def test_packed_rows_on_another_layout_make_the_same_of_pairs(pool: Pool) -> None:
    (whole,) = pool.run(preference_ranks.trained, Layout(dp=2), config("dpo"), data("dpo"), [12])[0]
    packed = config("dpo", data__isolate_documents=True, data__packing={}, layout__tp=2)
    (found,) = pool.run(preference_ranks.trained, Layout(tp=2), packed, data("dpo"), [12])[0]
    assert found.references == pytest.approx(whole.references, rel=1e-6)
    assert relative(found.evaluation.loss, whole.evaluation.loss) < 1e-5


@pytest.mark.fault(
    "input",
    "a batch for a preference loss with half a pair, a sample of no group, other weights in a pair, or without the "
    "scores of the reference model",
    happens="a DataError names the group or the sample and what to give, on every rank; the engine can go on",
    exit_code=3,
)
def test_groups_that_cannot_be_compared_are_named(pool: Pool, notice: Notice) -> None:
    """Empty answers, a rank without a sequence, and a step in which nothing is left are allowed."""
    good = preference_ranks.with_references(data("dpo"), [-5.0] * 12)
    none = replace(good[1], weights=[0.0] * len(good[1].input_ids))
    assert good[3].member is not None
    again = replace(good[3], member=replace(good[3].member, group=0))
    batches = [
        good[:1],
        [*good[:2], again],
        [good[0], replace(good[1], weight=7.0)],
        [*good[:2], replace(good[2], member=None)],
        [good[0], replace(good[1], member=GroupMember(0, "rejected"))],
        [good[0], none],
        [*good[2:4], good[0], none],
        good,
    ]
    expected = [
        "DataError: group 0 has 1 chosen and 0 rejected sequences",
        "DataError: group 0 has 1 chosen and 2 rejected sequences",
        "DataError: the two sequences of group 0 have different weights",
        "DataError: sample 2 of the batch belongs to no group",
        "DataError: sample 1 of the batch has no finite reference score",
        *[""] * 3,
    ]
    with notice:
        answers = pool.run(preference_ranks.messages, Layout(dp=2), config("dpo"), batches)
    for found in answers:
        for message, start in zip(found, expected, strict=True):
            assert message.startswith(start), message
            assert bool(message) == bool(start)
    assert notice.exit_code == 3
