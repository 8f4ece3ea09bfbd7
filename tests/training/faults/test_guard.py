"""Which steps are spikes, and how many bad ones a run survives, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mtrain.base.errors import NonFiniteError, NumericError, SpikeError, SpoiledStateError
from mtrain.checkpoint.store.manifest import NO_BAD_STEPS, BadStepHistory, RecentUpdates
from mtrain.config.schema.train import TrainSection
from mtrain.training.bad_steps import Guard, highest
from tests.messages import refuses


def section(**values: Any) -> TrainSection:
    return TrainSection(global_batch_size=1, num_steps=10_000, **values)


def guard_after(losses: list[float], action: str = "skip", **spike: Any) -> Guard:
    guard = Guard(section(on_spike={"action": action, "window_steps": 8, **spike}), NO_BAD_STEPS)
    for loss in losses:
        guard.judge(loss, 1.0)
        guard.accept(loss, 1.0)
    return guard


def test_the_limit_is_that_of_the_definition() -> None:
    """The median is 4.5; distances are 0.5, 0.5, 1.5, 1.5, 2.5, 2.5, 3.5, 3.5, whose median is 2."""
    assert highest([1, 2, 3, 4, 5, 6, 7, 8], 3.0) == pytest.approx(4.5 + 3 * 1.4826 * 2)
    assert highest([5.0] * 8, 10.0) == pytest.approx(5.5), "the spread is at least 1 % of the median"
    assert highest([5.0] * 7 + [1e9], 10.0) == pytest.approx(5.5), "one spike in the window hides no other"


def test_only_what_is_above_a_full_window_is_a_spike() -> None:
    guard_after([5.0] * 7).judge(1e9, 1e9)
    guard = guard_after([5.0] * 8)
    guard.judge(5.59, 1.0)
    guard.judge(0.0, 0.0)
    with refuses(SpikeError, "5.61"):
        guard.judge(5.61, 1.0)
    with refuses(SpikeError, "1.6", "1.5"):
        guard.judge(5.0, 1.6)
    guard_after([5.0] * 8, loss_deviations=None).judge(1e9, 1.0)


def test_a_start_goes_on_with_the_window() -> None:
    before = guard_after([5.0] * 8)
    after = Guard(section(on_spike={"action": "skip", "window_steps": 8}), before.history)
    assert after.history == before.history
    with pytest.raises(SpikeError):
        after.judge(6.0, 1.0)
    wider = Guard(section(on_spike={"action": "skip", "window_steps": 9}), before.history)
    wider.judge(6.0, 1.0)
    assert Guard(section(), before.history).history == NO_BAD_STEPS, "nothing is kept where nothing is judged"


def test_rates_count_updates_and_a_margin_is_left_out() -> None:
    guard = Guard(section(on_nonfinite="rollback", rollback_margin_steps=2), NO_BAD_STEPS)
    assert guard.refuse(7, NonFiniteError("nan")) == "rollback"
    assert guard.first_left_out_for(7) == 5
    assert [step for step in range(1, 12) if guard.left_out(step)] == [5, 6, 7, 8, 9]
    assert [guard.updates_before(step) for step in (5, 6, 7, 10, 11)] == [4, 4, 4, 4, 5]
    assert [each.step for each in guard.history.skipped if not each.is_margin] == [7]
    guard.rewind(BadStepHistory())
    assert guard.left_out(7) == "nan", "what was found since the checkpoint is still known"


def test_more_bad_steps_than_the_budget_end_the_run() -> None:
    guard = Guard(section(on_nonfinite="skip", max_bad_steps=2), NO_BAD_STEPS)
    for step in (10, 500, 1011):
        assert guard.refuse(step, NonFiniteError("nan")) == "skip"
    with refuses(NumericError, "1000", "train.max_bad_steps=2"):
        guard.refuse(1012, NonFiniteError("nan"))
    again = Guard(section(on_nonfinite="skip", max_bad_steps=2), guard.history)
    with refuses(NumericError, "1000"):
        again.refuse(1013, NonFiniteError("nan"))


def test_a_spoiled_state_is_never_skipped_and_gone_back_from_once() -> None:
    with pytest.raises(SpoiledStateError):
        Guard(section(on_nonfinite="skip"), NO_BAD_STEPS).refuse(7, SpoiledStateError("nan"))
    guard = Guard(section(on_nonfinite="rollback"), NO_BAD_STEPS)
    assert guard.refuse(7, SpoiledStateError("nan")) == "rollback"
    assert guard.left_out(7) is None
    with refuses(NumericError):
        guard.refuse(7, SpoiledStateError("nan"))


def test_stop_is_the_default_and_each_fault_has_its_own_action() -> None:
    with pytest.raises(NonFiniteError):
        Guard(section(), NO_BAD_STEPS).refuse(1, NonFiniteError("nan"))
    guard = guard_after([5.0] * 8, "skip")
    assert guard.refuse(9, SpikeError("high")) == "skip"
    with pytest.raises(NonFiniteError):
        guard.refuse(10, NonFiniteError("nan"))


def test_what_is_not_finite_enters_no_window() -> None:
    guard = guard_after([5.0] * 8)
    guard.accept(math.nan, 1.0)
    assert guard.history.recent == RecentUpdates(losses=(5.0,) * 8, grad_norms=(1.0,) * 8)
