"""The published schedule against the schedulers of Megatron-LM and of transformers."""

from typing import Any

import pytest

from mtrain.config.schema.train import AdamWSection
from mtrain.verify.reference.schedule import published_rate, telling_steps
from tests.plan.test_lr import megatron_rates

CASES: list[dict[str, Any]] = [
    {"schedule": "constant"},
    {"schedule": "constant", "warmup_steps": 7},
    {"schedule": "linear", "warmup_steps": 4, "min_lr": 1e-4},
    {"schedule": "cosine", "warmup_steps": 9, "min_lr": 1e-5, "decay_steps": 30},
    {"schedule": "cosine"},
    {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 12, "min_lr": 2e-4},
    {"schedule": "wsd"},
]


@pytest.mark.parametrize("section", CASES, ids=str)
def test_it_has_the_numbers_of_megatron(section: dict[str, Any]) -> None:
    optimizer = AdamWSection(lr=3e-3, **section)
    expected = megatron_rates(50, lr=3e-3, **section)
    found = [published_rate(number, optimizer, 50) for number in range(50)]
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-18)
    ahead = AdamWSection(lr=3e-3, schedule_convention="one_ahead", **section)
    assert [published_rate(number, ahead, 50) for number in range(49)] == found[1:]


def test_a_long_run_is_looked_at_where_its_schedule_turns() -> None:
    optimizer = AdamWSection(lr=1e-3, schedule="cosine", warmup_steps=2000, decay_steps=90_000)
    steps = telling_steps(optimizer, 100_000)
    assert len(steps) < 120
    assert {0, 1, 1999, 2000, 2001, 89_999, 90_000, 99_999} <= set(steps)
    assert max(steps) == 99_999
    assert telling_steps(AdamWSection(lr=1e-3, schedule="wsd"), 3) == [0, 1, 2]
