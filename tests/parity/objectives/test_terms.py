"""Several terms in one backward pass, loss functions of users, empty batches, and wrong denominators."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtrain.verify.reference.objective import Scene, weighted
from tests.parity import ranks
from tests.parity.batches import empty_batch, three_steps, two_steps, weighted_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    Deviation,
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    initial_parameters,
    relative,
    run_case,
    worst,
)
from tests.pool import Pool
from tests.reference import USER_TERMS, token_losses_of

CASES = [*map(lean, [case(), case(dp=2), case(cp=2), case(cp=2, cp_comm="ulysses", dp=2), case(tp=2, sp=True, pp=2)])]
TWO_TERMS: dict[str, Any] = {
    "loss__aggregation": "seq-mean-token-mean",
    "loss__side_terms": {
        "z": {"function": "z_loss", "coefficient": 0.05, "aggregation": "token-mean"},
        "hardest": {"aggregation": "token-sum-norm", "norm_length": 40, "coefficient": 0.3},
    },
}


FOCAL = "tests.parity.losses:focal_loss"


def _focal(scene: Scene, gamma: float) -> Tensor:
    log_probability = scene.logits.log_softmax(-1).gather(-1, scene.labels.unsqueeze(-1)).squeeze(-1)
    return weighted(-((1 - log_probability.exp()) ** gamma) * log_probability, scene.weights)


USERS: dict[str, Any] = {"loss__function": FOCAL, "loss__options": {"gamma": 2.0}}
DAY = [
    Row("different denominators", TWO_TERMS, CASES[4], weighted_steps()[:2]),
    Row("a user's function", USERS, CASES[4], two_steps()[:1]),
]
ROWS = [
    row
    for each in CASES
    for row in (
        Row("different denominators", TWO_TERMS, each, weighted_steps()[:2]),
        Row("a user's function", USERS, each, two_steps()),
    )
]


# the day has terms of different denominators on the other axes in test_aggregations.py
@pytest.mark.parametrize("rows", by_layout(DAY, night=ROWS))
def test_terms_with_different_denominators_and_a_users_loss_function(
    pool: Pool, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(USER_TERMS, FOCAL, _focal)
    assert_rows_exact(pool, rows)


@pytest.mark.parametrize("case", [CASES[2], CASES[4], *map(at_night, (*CASES[:2], CASES[3]))], ids=str)
def test_a_denominator_that_is_known_after_the_forward_pass(pool: Pool, case: Case) -> None:
    changes = {
        "loss__function": "tests.parity.losses:hard_tokens",
        "loss__options": {"above": 4.2},
        "loss__denominator": "measured",
    }
    config, batch = case.config(**changes), three_steps()[0]
    (step,) = run_case(pool, case, [batch], **changes).steps
    leaves = {name: torch.as_tensor(value).requires_grad_() for name, value in initial_parameters(config).items()}
    losses = torch.cat(token_losses_of(leaves, config.model, batch))
    kept = losses > 4.2  # masked tokens have loss 0
    assert 20 < kept.sum() < 160  # of 186
    loss = losses[kept].mean()
    loss.backward()
    exact = {name: value.grad.numpy() for name, value in leaves.items() if value.grad is not None}
    norm = float(np.sqrt(sum((value**2).sum() for value in exact.values())))
    assert step.terms["main"].denominator == kept.sum().item()
    Deviation(
        relative(step.loss, loss.item()),
        relative(step.grad_norm, norm),
        worst(step.gradients, exact, config),
        weights=0.0,
    ).assert_below()


@pytest.mark.parametrize(
    "case",
    # the optimizer is divided over dp and cp alike
    [CASES[2], CASES[4], *map(at_night, [*CASES[:2], CASES[3], lean(case(tp=2, sp=True, pp=2, vpp=2, dp=2))])],
    ids=str,
)
def test_an_empty_batch_leaves_every_bit(pool: Pool, case: Case) -> None:
    config = case.config(**TWO_TERMS)
    batches = [three_steps()[0], empty_batch()]
    reports = pool.run(ranks.bits_around_a_step, case.resolved(config), config, initial_parameters(config), batches)
    for report in reports:
        assert report.is_empty
        assert report.loss == 0.0
        assert report.num_state_tensors > 0
        assert report.largest_gradient == 0.0
        assert report.before == report.after


DOUBLE = ("double_counting", ["'main'", "372.0", "186.0"])


@pytest.mark.parametrize(
    ("function", "words", "case"),
    [
        (*DOUBLE, CASES[2]),
        *(at_night(*DOUBLE, each) for each in (CASES[1], *CASES[3:])),
        ("negative", ["'main'", "-186.0"], CASES[2]),
        ("not_a_number", ["'main'", "nan"], CASES[4]),
    ],
    ids=str,
)
def test_a_wrong_sum_stops_every_rank(pool: Pool, function: str, words: list[str], case: Case) -> None:
    """Tests tokens in any place; the host decides which sum is wrong, alike under all layouts."""
    config = case.config(loss__function=f"tests.parity.losses:{function}")
    batch = three_steps()[0]
    messages = pool.run(ranks.numeric_error, case.resolved(config), config, initial_parameters(config), batch)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in words), messages[0]
