"""Faults of balancing losses and biases in plain Megatron-Core; tests/parity/models/test_balance.py shows ours."""

from typing import Any

import numpy as np
import torch

from mtrain.arch.layout import Layout
from tests.known_issues import balance_ranks as ranks
from tests.pool import Pool

Z = {"moe_z_loss_coeff": 1.0, "moe_router_load_balancing_type": "none"}
BY_SEQUENCE = {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "seq_aux_loss"}
RUNNING = {"moe_aux_loss_coeff": 1.0, "moe_router_load_balancing_type": "global_aux_loss"}


def logits_of(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((*shape, ranks.EXPERTS)).astype(np.float32)


def test_auxiliary_losses_weigh_tokens_without_a_loss(pool: Pool) -> None:
    logits = logits_of(8, 1)
    leaf = torch.as_tensor(logits).requires_grad_()
    (exact,) = torch.autograd.grad(leaf.logsumexp(-1).square().mean(), leaf)
    (whole,) = pool.run(ranks.gradients, Layout(), [logits], False, Z)[0]
    # not divided yet by the tokens with a loss: with one such token of 8 it is 8 times too strong
    np.testing.assert_allclose(whole / 1, 8 * exact, rtol=1e-5)


def test_auxiliary_losses_shrink_with_ranks_and_rows(pool: Pool) -> None:
    logits = logits_of(8, 1)
    (whole,) = pool.run(ranks.gradients, Layout(), [logits], False, Z)[0]
    parts = [each[0] for each in pool.run(ranks.gradients, Layout(cp=2), [logits], True, Z)]
    np.testing.assert_allclose(np.concatenate(parts), whole / 2, rtol=1e-5)

    rows = logits_of(8, 2)
    (together,) = pool.run(ranks.gradients, Layout(), [rows], False, BY_SEQUENCE)[0]
    alone = pool.run(ranks.gradients, Layout(), [rows[:, :1], rows[:, 1:]], False, BY_SEQUENCE)[0]
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1) / 2, rtol=1e-4, atol=1e-7)


def test_running_losses_shrink_with_data_parallel_ranks_and_follow_the_order(pool: Pool) -> None:
    first, second = logits_of(8, 1), logits_of(8, 1, seed=1)
    (alone, behind) = pool.run(ranks.gradients, Layout(), [first, second], False, RUNNING)[0]
    for shared, _ in pool.run(ranks.gradients, Layout(dp=2), [first, second], False, RUNNING):
        np.testing.assert_allclose(shared, alone / 2, rtol=1e-4, atol=1e-7)
    (before, _) = pool.run(ranks.gradients, Layout(), [second, first], False, RUNNING)[0]
    assert np.abs(behind - before).max() > 0.01 * np.abs(before).max()


def test_masked_counts_of_a_rank_are_those_of_all_ranks(pool: Pool) -> None:
    """Has ranks of 1 and 2 tokens that both believe that they have 3."""
    assert pool.run(ranks.token_counts, Layout(dp=2)) == [(3.0, 3.0), (3.0, 3.0)]


def test_a_mask_takes_experts_away_where_it_should_take_tokens(pool: Pool) -> None:
    padding = np.array([[False], [False], [True], [True]])
    counts = pool.run(ranks.counts_under_a_mask, Layout(), logits_of(4, 1), padding)[0]
    chosen = torch.as_tensor(logits_of(4, 1)[:, 0]).topk(2).indices
    right = torch.bincount(chosen[:2].flatten(), minlength=4).tolist()
    assert counts == [*torch.bincount(chosen.flatten(), minlength=4).tolist()[:2], 0, 0]
    assert counts != right
    padding = np.concatenate([padding, padding])
    error = pool.run(ranks.counts_under_a_mask, Layout(), logits_of(8, 1), padding)[0]
    assert "must match the size" in error


def test_biases_move_before_the_optimizer_refuses_the_step(pool: Pool) -> None:
    bias = pool.run(ranks.bias_after_an_infinite_gradient, Layout(), logits_of(8, 1))[0]
    assert any(bias)


def test_the_first_stage_alone_cuts_the_padding_mask(pool: Pool) -> None:
    found = pool.run(ranks.padding_mask_of_a_stage, Layout(tp=2, sp=True, pp=2))
    assert sorted(found) == [(8, 4), (8, 4), (8, 8), (8, 8)]


def test_layers_beyond_the_recomputed_ones_lose_the_padding_mask(pool: Pool) -> None:
    assert pool.run(ranks.layers_without_their_mask, Layout()) == [[1]]


def test_the_padding_mask_is_cut_by_the_global_group(pool: Pool) -> None:
    """Shows the first half of a row where the second belongs, and the reverse: ranks (dp, tp) = (0, 1) and (1, 0)."""
    found = pool.run(ranks.padding_mask_by_groups, Layout(tp=2, sp=True, dp=2))
    assert found == [[False] * 4, [False] * 4, [True] * 4, [True] * 4]


def test_the_z_loss_of_a_repeated_depth_is_divided_in_the_log_alone(pool: Pool) -> None:
    each: dict[str, Any] = {**Z, "mtp_num_layers": 2}
    logits = logits_of(8, 1)
    (once, logged), (repeated, divided) = (
        pool.run(ranks.z_loss_of_a_depth, Layout(), logits, {**each, "mtp_use_repeated_layer": is_repeated})[0]
        for is_repeated in (False, True)
    )
    assert divided == [logged[0] / 2]
    np.testing.assert_array_equal(repeated, once)  # the router is called twice, so this should be a half
