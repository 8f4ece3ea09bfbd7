"""A shortened run of examples/grpo_loop.py."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from mtrain.arch.layout import Layout
from tests.pool import Pool
from tests.training.sampling import sampling_ranks


@pytest.mark.nightly  # tests/test_examples.py has rewards that rise, test_sampler.py the same answers on any layout
def test_rewards_rise_and_are_the_same_on_two_layouts(pool: Pool, tmp_path: Path) -> None:
    """Ten steps of rewards follow the supervised ones."""
    given = [f"run.dir={tmp_path}", "train.num_steps=25", "train.device=cpu"]
    over_data = pool.run(sampling_ranks.grpo_rewards, Layout(dp=2), given)
    over_tensors = pool.run(sampling_ranks.grpo_rewards, Layout(tp=2), [*given, "layout.tp=2"])
    rewards = over_data[0]
    assert len(rewards) == 10
    assert all(each == rewards for each in (*over_data, *over_tensors)), "the very answers"
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.05


@pytest.mark.nightly  # weights after each step: engine_parts/test_weight_deltas.py; the loop: tests/test_examples.py
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_draws_with_the_weights_of_the_moment_where_it_is_installed(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    """Answers are the same on all ranks, and each is as likely as the trainer says, before and after an update."""
    given = [f"run.dir={tmp_path}", "train.num_steps=2", "train.device=cpu", f"layout.tp={ranks}"]
    everyone = pool.run(sampling_ranks.vllm_rollouts, Layout(tp=ranks), given)
    assert all(each == everyone[0] for each in everyone)
    rewards, updates, drawn = everyone[0]
    assert 0 < rewards[0] < 1
    assert (len(rewards), updates) == (1, [1])
    for answers, expected in drawn:
        assert [each.log_probs for each in answers] == [pytest.approx(each, abs=2e-6) for each in expected]
    assert len({tuple(each.token_ids) for each in drawn[0][0]}) > 1, "a prompt that comes twice has two answers"
    assert [each.log_probs for each in drawn[0][0]] != [each.log_probs for each in drawn[1][0]]
    assert list(tmp_path.iterdir()) == [], "the folder of the first weights is gone"
