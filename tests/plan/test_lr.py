"""The learning rate by step, judged by the schedulers of Megatron-LM and of transformers."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from mtrain.arch.lr import learning_rate
from mtrain.config.schema.train import AdamWSection

ULP = 2.0**-52


def rates(num_steps: int, **section: Any) -> list[float]:
    optimizer = AdamWSection(**section)
    return [learning_rate(step, optimizer, num_steps) for step in range(num_steps)]


def megatron_rates(num_steps: int, batch_size: int = 1, **section: Any) -> list[float]:
    """Returns the rates of Megatron-LM's loop: update, then step the scheduler by the samples of the batch."""
    wanted = AdamWSection(**section)
    is_wsd = wanted.schedule == "wsd"
    length = wanted.decay_steps or (max(1, num_steps // 10) if is_wsd else num_steps)
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=wanted.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=wanted.warmup_steps * batch_size,
        lr_decay_steps=(num_steps if is_wsd else length) * batch_size,
        lr_decay_style="WSD" if is_wsd else wanted.schedule,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        wsd_decay_steps=length * batch_size,
        lr_wsd_decay_style="linear",
    )
    found = []
    for _ in range(num_steps):
        found.append(group["lr"])
        scheduler.step(increment=batch_size)
    return found


def transformers_rates(num_steps: int, lr: float, build: Callable[..., Any], **how: Any) -> list[float]:
    """Returns the rates of a loop with transformers' schedules: optimizer.step(), then scheduler.step()."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = build(optimizer, **how)
    found = []
    for _ in range(num_steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Draws the number of updates of a run, and a legal optimizer section."""
    num_steps = draw(st.integers(2, 120))
    lr = draw(st.floats(1e-7, 10.0))
    section: dict[str, Any] = {"lr": lr, "schedule": draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))}
    section["min_lr"] = draw(st.sampled_from([0.0, lr, lr * draw(st.floats(1e-6, 1.0))]))
    section["warmup_steps"] = draw(st.integers(0, num_steps - 1))
    if draw(st.booleans()):
        room = num_steps - section["warmup_steps"]
        is_wsd = section["schedule"] == "wsd"
        first = 1 if is_wsd else section["warmup_steps"] + 1
        section["decay_steps"] = draw(st.integers(first, room if is_wsd else num_steps))
    return num_steps, section


@given(schedules())
def test_every_rate_is_megatrons_to_the_last_bit(drawn: tuple[int, dict[str, Any]]) -> None:
    num_steps, section = drawn
    assert rates(num_steps, **section) == megatron_rates(num_steps, **section)


@given(schedules(), st.integers(2, 5000))
def test_a_scheduler_that_counts_samples_differs_by_the_rounding_of_one_product(
    drawn: tuple[int, dict[str, Any]], batch_size: int
) -> None:
    num_steps, section = drawn
    warmup, found = section["warmup_steps"], rates(num_steps, **section)
    counted = megatron_rates(num_steps, batch_size, **section)
    assert found[warmup + 1 :] == counted[warmup + 1 :]
    assert found[: warmup + 1] == pytest.approx(counted[: warmup + 1], rel=2 * ULP, abs=0)


TRANSFORMERS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "constant": (get_constant_schedule_with_warmup, {}, {"schedule": "constant"}),
    "linear": (get_linear_schedule_with_warmup, {"num_training_steps": 40}, {"schedule": "linear"}),
    "linear with min_lr": (
        get_polynomial_decay_schedule_with_warmup,
        {"num_training_steps": 40, "lr_end": 1e-5},
        {"schedule": "linear", "min_lr": 1e-5},
    ),
    "linear to an earlier end": (
        get_linear_schedule_with_warmup,
        {"num_training_steps": 30},
        {"schedule": "linear", "decay_steps": 30},
    ),
    "cosine": (get_cosine_schedule_with_warmup, {"num_training_steps": 40}, {"schedule": "cosine"}),
    "cosine with min_lr": (
        get_cosine_with_min_lr_schedule_with_warmup,
        {"num_training_steps": 40, "min_lr": 1e-5},
        {"schedule": "cosine", "min_lr": 1e-5},
    ),
    "wsd": (
        get_wsd_schedule,
        {"num_training_steps": 40, "num_decay_steps": 12, "decay_type": "linear"},
        {"schedule": "wsd", "decay_steps": 12},
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_every_rate_is_that_of_transformers_to_rounding(name: str, warmup: int) -> None:
    build, how, section = TRANSFORMERS[name]
    expected = transformers_rates(40, 3e-4, build, num_warmup_steps=warmup, **how)
    found = rates(40, lr=3e-4, warmup_steps=warmup, **section)
    # where a rate ends near 0, the remainder of lr - lr is rounding of lr, not of the rate
    assert found == pytest.approx(expected, rel=4 * ULP, abs=3e-4 * 4 * ULP)


def test_warm_up_begins_at_zero_and_reaches_the_full_rate_after_so_many_updates() -> None:
    assert rates(6, lr=1.0, warmup_steps=4, schedule="constant") == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_last_update_of_a_decay_to_zero_has_a_rate() -> None:
    assert rates(4, lr=1.0, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(5, lr=1.0, schedule="linear", decay_steps=2) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert rates(20, lr=1.0, schedule="wsd") == [1.0] * 19 + [0.5]


ONE_AHEAD: dict[str, Any] = {"schedule_convention": "one_ahead"}
"""Convention of the first version of this program, with which its runs go on."""
RECORDED: list[tuple[dict[str, Any], list[float]]] = [
    (
        {"schedule": "linear", "warmup_steps": 3},
        [9.999999999999999e-05, 0.00019999999999999998, 0.0003, 0.00022333333333333333, 0.00014666666666666666, 7e-05],
    ),
    (
        {"schedule": "cosine", "warmup_steps": 2},
        [0.00015, 0.0003, 0.0002663172798364529, 0.000185, 0.00010368272016354703, 7e-05],
    ),
    (
        {"schedule": "wsd", "decay_steps": 3},
        [0.0003, 0.0003, 0.0003, 0.00022333333333333333, 0.00014666666666666666, 7e-05],
    ),
]
"""Schedules and rates of the program before it had `optimizer.schedule_convention`."""


@pytest.mark.parametrize(("section", "recorded"), RECORDED, ids=["linear", "cosine", "wsd"])
def test_one_ahead_keeps_the_rates_of_runs_begun_before_to_the_last_bit(
    section: dict[str, Any], recorded: list[float]
) -> None:
    assert rates(6, lr=3e-4, min_lr=7e-5, **section, **ONE_AHEAD) == recorded


@given(schedules())
def test_one_ahead_is_the_next_updates_rate(drawn: tuple[int, dict[str, Any]]) -> None:
    num_steps, section = drawn
    before = rates(num_steps, **section, **ONE_AHEAD)
    assert before[:-1] == pytest.approx(rates(num_steps, **section)[1:], rel=4 * ULP, abs=section["lr"] * 4 * ULP)
    ends = section["schedule"] != "constant" and section["warmup_steps"] < num_steps
    assert math.isclose(before[-1], section["min_lr"] if ends else section["lr"], rel_tol=4 * ULP)
