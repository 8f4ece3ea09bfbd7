"""The learning rate by step."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.config.train import OptimizerSection
from mtrain.lr import learning_rate


def rates(num_steps: int, **section: Any) -> list[float]:
    optimizer = OptimizerSection(**section)
    return [learning_rate(step, optimizer, num_steps) for step in range(num_steps)]


def test_warm_up_rises_to_the_full_rate() -> None:
    assert rates(6, lr=1.0, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_the_smallest_rate_with_the_last_update() -> None:
    assert rates(6, lr=1.0, min_lr=0.2, warmup_steps=2, schedule="linear") == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_linear_stays_at_the_smallest_rate_after_its_decay() -> None:
    assert rates(5, lr=1.0, schedule="linear", decay_steps=2) == [0.5, 0.0, 0.0, 0.0, 0.0]


def test_cosine_follows_half_a_turn() -> None:
    expected = [(1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4)]
    assert rates(4, lr=1.0, schedule="cosine") == pytest.approx(expected, abs=1e-15)


def test_wsd_falls_over_the_last_tenth() -> None:
    found = rates(20, lr=1.0, min_lr=0.5, warmup_steps=2, schedule="wsd")
    assert found == pytest.approx([0.5] + [1.0] * 17 + [0.75, 0.5])


def test_wsd_falls_over_as_many_steps_as_asked() -> None:
    assert rates(5, lr=1.0, schedule="wsd", decay_steps=4) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


schedules = st.sampled_from(["linear", "cosine", "wsd"])


@given(schedules, st.integers(2, 300), st.data())
def test_every_schedule_rises_then_falls_and_ends_exactly_at_its_bounds(
    schedule: str, num_steps: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, num_steps - max(1, num_steps // 10)))
    found = rates(num_steps, lr=3e-4, min_lr=1e-5, warmup_steps=warmup, schedule=schedule)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[max(0, warmup - 1) :] == sorted(found[max(0, warmup - 1) :], reverse=True)
    assert found[-1] == (3e-4 if warmup == num_steps else 1e-5)
    assert warmup == 0 or found[warmup - 1] == 3e-4
