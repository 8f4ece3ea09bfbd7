"""Losses of routers against their definitions, token by token."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from mtrain.config.schema.loss import RouterLossSection
from mtrain.core.loss.router import (
    GLOBAL_BALANCE,
    MICROBATCH_BALANCE,
    ROUTER_TERMS,
    SEQUENCE_BALANCE,
    Z,
    balance_losses,
    choices_by_sequence,
    normalised_scores,
    router_denominator,
    squared_logsumexp,
)

SEQ, BATCH, EXPERTS, TOP_K = 7, 3, 5, 2
LENGTHS = (7, 0, 4)
IS_TEXT = torch.tensor([[t < length for length in LENGTHS] for t in range(SEQ)])


def random_logits(seed: int = 0) -> Tensor:
    logits = torch.randn(SEQ, BATCH, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[~IS_TEXT] = torch.tensor([math.inf, math.nan, 3.0, -math.inf, 0.0], dtype=torch.float64)
    return logits.requires_grad_()


def row_ids(is_text: torch.Tensor) -> torch.Tensor:
    """Returns [seq, batch] the sequence number of each token, one per row; -1 where there is no text."""
    return torch.where(is_text, torch.arange(is_text.shape[1]), -1)


def balance_by_row(scores: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    return balance_losses(scores, choices.expand(*scores.shape[:2], -1))


def balance_by_definition(tokens: list[list[float]], score: str) -> float:
    """Returns E x sum over e of (share of the choices) x (mean of the normalized score)."""
    chosen, means = [0] * EXPERTS, [0.0] * EXPERTS
    for logits in tokens:
        scores = [math.exp(x) if score == "softmax" else 1 / (1 + math.exp(-x)) for x in logits]
        for e in sorted(range(EXPERTS), key=lambda e: -scores[e])[:TOP_K]:
            chosen[e] += 1
        for e in range(EXPERTS):
            means[e] += scores[e] / sum(scores) / len(tokens)
    return EXPERTS * sum(count / (TOP_K * len(tokens)) * mean for count, mean in zip(chosen, means, strict=True))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_mean_over_a_set_of_tokens_is_its_balancing_loss(score: Literal["softmax", "sigmoid"]) -> None:
    logits = random_logits()
    scores = normalised_scores(logits, score, IS_TEXT)
    choices = choices_by_sequence(scores, TOP_K, row_ids(IS_TEXT), BATCH)
    assert choices.sum(1).tolist() == [TOP_K * length for length in LENGTHS]
    rows = [logits.detach()[:length, row].tolist() for row, length in enumerate(LENGTHS)]
    by_row = balance_by_row(scores, choices).sum(0) / IS_TEXT.sum(0)
    for row in (0, 2):
        assert by_row[row].item() == pytest.approx(balance_by_definition(rows[row], score), rel=1e-12)
    of_all = balance_losses(scores, choices.sum(0)).sum() / sum(LENGTHS)
    assert of_all.item() == pytest.approx(balance_by_definition(rows[0] + rows[2], score), rel=1e-12)


def test_an_even_load_costs_one() -> None:
    even = torch.eye(EXPERTS).unsqueeze(1) * 1e-3  # each token has another favourite, by very little
    scores = normalised_scores(even, "softmax", torch.ones(EXPERTS, 1, dtype=torch.bool))
    losses = balance_by_row(scores, choices_by_sequence(scores, 1, torch.zeros(EXPERTS, 1, dtype=torch.int64), 1))
    torch.testing.assert_close(losses, torch.ones(EXPERTS, 1))


def test_padding_has_no_loss_and_no_gradient_whatever_its_logits_are() -> None:
    logits = random_logits()
    squared = squared_logsumexp(logits, IS_TEXT)
    scores = normalised_scores(logits, "sigmoid", IS_TEXT)
    balance = balance_by_row(scores, choices_by_sequence(scores, TOP_K, row_ids(IS_TEXT), BATCH))
    assert not squared[~IS_TEXT].any()
    assert not balance[~IS_TEXT].any()
    (gradient,) = torch.autograd.grad(squared.sum() + balance.sum(), logits)
    assert not gradient[~IS_TEXT].any()
    assert gradient[IS_TEXT].all()
    first = math.log(sum(math.exp(x) for x in logits[0, 0].tolist())) ** 2
    assert squared[0, 0].item() == pytest.approx(first, rel=1e-12)


def test_denominators_count_text() -> None:
    padding = [~IS_TEXT.t(), torch.zeros(2, SEQ, dtype=torch.bool)]
    rows: list[torch.Tensor | None] = [None, None]
    assert router_denominator(SEQUENCE_BALANCE, padding, rows) == 4
    assert router_denominator(SEQUENCE_BALANCE, padding, rows) == 4
    # two sequences in each row: 4 + 3, none and 4 + 0 tokens of text; in the other microbatch one over both rows
    two_each = torch.arange(6).view(3, 2).repeat_interleave(4, dim=1)[:, :SEQ]
    ids: list[torch.Tensor | None] = [two_each, torch.zeros(2, SEQ, dtype=torch.int64)]
    assert router_denominator(SEQUENCE_BALANCE, padding, ids) == 3 + 1
    for term in (Z, MICROBATCH_BALANCE, GLOBAL_BALANCE):
        assert router_denominator(term, padding, rows) == router_denominator(term, padding, ids) == 11 + 14
        assert router_denominator(term, [], []) == 0


def test_every_coefficient_has_a_term_and_no_other_name_is_taken_for_one() -> None:
    section = RouterLossSection(**dict.fromkeys(RouterLossSection.model_fields, 0.5))
    assert section.coefficients.keys() == ROUTER_TERMS.keys()
    with pytest.raises(AssertionError):
        router_denominator("router_new", [], [])  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        normalised_scores(torch.zeros(1, 1, 2), "tanh", torch.ones(1, 1, dtype=torch.bool))  # type: ignore[arg-type]
