"""examples/grpo_loop.py at reduced length."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from mtrain.plan.layout import Layout
from tests.pool import Pool
from tests.training.sampling import sampling_ranks


def test_rewards_rise_and_are_the_same_on_two_layouts(pool: Pool, tmp_path: Path) -> None:
    """Ten steps of rewards behind the supervised ones."""
    given = [f"run.dir={tmp_path}", "train.num_steps=25", "train.device=cpu"]
    over_data = pool.run(sampling_ranks.grpo_rewards, Layout(dp=2), given)
    over_tensors = pool.run(sampling_ranks.grpo_rewards, Layout(tp=2), [*given, "layout.tp=2"])
    rewards = over_data[0]
    assert len(rewards) == 10
    assert all(each == rewards for each in (*over_data, *over_tensors)), "the very answers"
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.05
