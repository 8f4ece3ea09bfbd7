"""Losses of routers and biases of the choice: the same on every layout, and counted over text only."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.config import Config
from mtrain.core.batch.order import slots
from mtrain.verify.reference.model.experts import SEQUENCE_BALANCE, Routed, router_numerator
from tests.parity import balance_ranks as ranks
from tests.parity.batches import GlobalBatch, cut, documents_steps, empty_batch, padded_steps, three_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    initial_parameters,
    run_case,
    tensor_deviation,
    without_padding,
)
from tests.parity.expert_models import DEEPSEEK, MIXTRAL
from tests.parity.ranks import Run, losses_along, train_each
from tests.pool import Pool
from tests.reference import doubles, forward_of, rows_of, token_losses_of

E = 7e-4
"""Step of the finite difference: small enough that no token changes its expert, which some do at four times of it;
large enough for the difference of two losses, which are float32 numbers of about 100."""
LOSSES: dict[str, Any] = {"loss__router": {"z_coefficient": 0.05, "sequence_balance_coefficient": 0.3}}
MOVING = {"model__experts": {**DEEPSEEK["model__experts"], "bias_update_rate": 0.01}}
SOFTMAX, SIGMOID = {**MIXTRAL, **LOSSES}, {**MOVING, **LOSSES}
RECOMPUTED = {**SIGMOID, "train__recompute": "full"}
PACKED = {**SIGMOID, "data__isolate_documents": True, "data__kind": "indexed", "data__train": [{"path": "unused"}]}
ROWS = {**SOFTMAX, "loss__aggregation": "seq-mean-token-mean"}
RUNS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "recomputed": RECOMPUTED, "packed": PACKED, "rows": ROWS}

CASES: list[tuple[str, Case]] = [
    ("softmax", case(4)),
    ("softmax", case(4, dp=2, ep=2)),
    ("softmax", case(2, tp=2, sp=True, etp=2)),
    ("sigmoid", case(1, dp=4, ep=4)),
    ("sigmoid", case(2, tp=2, sp=True, ep=2)),
    ("sigmoid", case(2, cp=2, cp_comm="ulysses", dp=2)),
    ("sigmoid", case(2, tp=2, sp=True, cp=2, ep=4)),
    ("sigmoid", case(2, tp=2, sp=True, pp=2, dp=2, ep=2)),
    ("sigmoid", case(2, tp=2, sp=True, pp=2, vpp=2, cp=2, ep=2)),
    ("recomputed", case(1, pp=2, vpp=2, dp=2, ep=2)),
    ("packed", case(2, cp=2, ep=2)),
    ("packed", case(2, tp=2, sp=True, pp=2)),
    ("rows", case(2, cp=2, dp=2, ep=4)),
]


def steps_of(run: str) -> list[GlobalBatch]:
    """Returns rows with padding; documents of a row; ragged loss masks with ranks that have no loss token."""
    return {"packed": documents_steps, "rows": three_steps}.get(run, padded_steps)()[:2]


LEAN = [Row(run, RUNS[run], lean(each), steps_of(run)) for run, each in CASES]
DAY = [
    Row(run, RUNS[run], lean(each), steps_of(run)[:1])
    for run, each in (
        ("softmax", case(2, tp=2, sp=True, etp=2)),
        ("sigmoid", case(2, tp=2, sp=True, cp=2, ep=4)),
        ("recomputed", case(1, pp=2, vpp=2, dp=2, ep=2)),
        ("packed", case(2, cp=2, ep=2)),
        ("rows", case(2, cp=2, ep=2)),
    )
]
"""Rows of one step each: `test_biases_move_with_the_weights_alone` shows that the next one has the biases."""


@pytest.mark.parametrize("rows", by_layout(DAY, night=LEAN))
def test_balancing_does_not_change_with_the_layout(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)


@pytest.mark.parametrize(
    "case",
    # the losses of test_balancing_does_not_change_with_the_layout are made of these counts, over tp and cp by day
    [at_night(case(8, tp=2, sp=True, cp=2)), case(4, pp=2, vpp=2, dp=2)],
    ids=str,
)
def test_counts_are_exact_and_of_text_alone(pool: Pool, case: Case) -> None:
    """Runs every layer twice; padding, half of all positions, goes to other experts."""
    config, batch = case.config(**RECOMPUTED), padded_steps()[0]
    parameters = initial_parameters(config)
    seen = forward_of(doubles(parameters), config.model, rows_of(batch)).seen
    exact = {router.name: router.chosen[router.is_text].sum(0).tolist() for router in seen}
    everyone = pool.run(ranks.counts, case.resolved(config), config, parameters, batch)
    found = {name: np.sum([own[name] for own in everyone if name in own], axis=0).tolist() for name in exact}
    assert found == exact
    num_text = sum(len(sample.tokens) for sample in batch)
    assert [sum(each) for each in found.values()] == [4 * num_text] * 3


def other_masks(batch: GlobalBatch) -> GlobalBatch:
    """Draws a loss mask with one token in ten."""
    rows = [np.where(np.arange(len(row.tokens)) % 10 == 3, row.mask, 0.0) for row in batch]
    return [replace(row, mask=mask) for row, mask in zip(batch, rows, strict=True)]


@pytest.mark.nightly  # by day the oracle counts tokens of masked rows as well, above
def test_the_loss_mask_changes_nothing_of_it(pool: Pool) -> None:
    """Compares values bit for bit, and the gradient that the terms add, which is a difference of two runs."""
    one = case(4, num_layers=2, dp=2, ep=2)
    strong = {**MOVING, "loss__router": {"z_coefficient": 30.0, "sequence_balance_coefficient": 200.0}}
    configs = [one.config(**run) for run in (strong, MOVING)]
    runs = [
        Run(config, initial_parameters(config), [batch])
        for batch in (padded_steps()[0], other_masks(padded_steps()[0]))
        for config in configs
    ]
    outcomes = pool.run(train_each, one.resolved(configs[0]), runs)[0]
    added, values = [], []
    for (step,), (plain,) in ((outcomes[at].steps, outcomes[at + 1].steps) for at in (0, 2)):
        values.append([step.terms[name] for name in ("router_z", "router_sequence_balance")])
        assert step.gradients is not None
        assert plain.gradients is not None
        added.append({name: step.gradients[name] - plain.gradients[name] for name in step.gradients})
        main = step.terms["main"].denominator
    assert values[0] == values[1]
    assert main < 0.2 * values[0][0].denominator
    for name, value in added[0].items():
        if name.endswith("router.weight"):
            assert tensor_deviation(added[1][name], value) < 1e-5


def test_biases_move_with_the_weights_alone(pool: Pool) -> None:
    """Checks that biases stay in an empty batch, in one that fp16 skips, and in one that stops the run."""
    one = case(8, num_layers=2, dp=2, ep=2)
    full, empty = padded_steps()[0], empty_batch()
    config = one.config(**SIGMOID)
    moments = pool.run(ranks.biases_by_step, one.resolved(config), config, initial_parameters(config), [empty, full])[0]
    given = initial_parameters(config)
    before = {name: given[f"{name}.expert_bias"].astype(np.float32).tolist() for name in moments[0].biases}
    assert moments[0].is_empty
    assert moments[0].biases == before
    steps = np.array(list(moments[1].biases.values())) - np.array(list(before.values()))
    assert set(np.round(np.abs(steps), 6).ravel()) <= {0.0, 0.01}
    assert np.abs(steps).any(1).all()

    half = one.config(**SIGMOID, train__precision="fp16", train__initial_loss_scale=2.0**24)
    moments = pool.run(ranks.biases_by_step, one.resolved(half), half, initial_parameters(half), [full] * 8)[0]
    overflows = [moment.overflowed for moment in moments]
    assert overflows[0]
    assert not overflows[-1]
    previous = [before, *(moment.biases for moment in moments[:-1])]
    for moment, earlier in zip(moments, previous, strict=True):
        assert (moment.biases == earlier) == moment.overflowed

    broken = initial_parameters(config)
    broken["output_layer.weight"] = np.full_like(broken["output_layer.weight"], np.inf)
    (moment,) = pool.run(ranks.biases_by_step, one.resolved(config), config, broken, [full])[0]
    assert moment.overflowed
    assert moment.biases == before


@pytest.mark.nightly  # the day compares its loss and its gradient with the oracle's
def test_the_logged_objective_has_the_slope_of_the_gradient(pool: Pool) -> None:
    """Checks (L(w + e v) - L(w - e v)) / 2e = <gradient, v>, without the oracle.

    It has few tokens and a small e, so that no token goes to another expert meanwhile: the objective jumps there.
    """
    one = case(2, num_layers=2, tp=2, sp=True, pp=2, ep=2)
    strong = {"z_coefficient": 3.0, "sequence_balance_coefficient": 20.0}
    run = {**MIXTRAL, "loss__router": strong, "train__global_batch_size": 4}
    config, batch = one.config(**run), [cut(sample, 3) for sample in three_steps()[0][:4]]
    parameters = initial_parameters(config)
    (step,) = run_case(pool, one, [batch], **run).steps
    gradients = without_padding(step.gradients, config.model.vocab_size)
    size = np.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in gradients.values()))
    direction = {name: value / size for name, value in gradients.items()}
    arguments = (config, parameters, direction, [E, -E, 2 * E, -2 * E], batch)
    one_e, minus, two, minus_two = pool.run(losses_along, one.resolved(config), *arguments)[0]
    assert (8 * (one_e - minus) - (two - minus_two)) / (12 * E) == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize("kind", ["microbatch", pytest.param("global", marks=pytest.mark.nightly)])  # running counts
def test_what_follows_the_layout_is_what_its_name_says(pool: Pool, kind: str) -> None:
    """Checks the mean over tokens of their microbatch's loss; with running counts, of all microbatches so far."""
    one = case(2, num_layers=2, dp=2, ep=2)
    run = {
        **MIXTRAL,
        "loss__router": {f"{kind}_balance_coefficient": 5.0},
        "loss__allow_layout_dependent": True,
        "train__recompute": "full",
    }
    config, batch = one.config(**run), padded_steps()[0]
    (step,) = run_case(pool, one, [batch], **run).steps

    leaves = {name: value.requires_grad_() for name, value in doubles(initial_parameters(config)).items()}
    seen = forward_of(leaves, config.model, rows_of(batch)).seen
    numerator = torch.stack([layer_sum(kind, router, config) for router in seen]).sum()
    tokens, counted = sum(len(row.tokens) for row in batch), sum(row.mask.sum() for row in batch)
    main = torch.cat(token_losses_of(leaves, config.model, batch)).sum() / counted
    objective = main + 5.0 * numerator / tokens
    totals = step.terms[f"router_{kind}_balance"]
    assert totals.denominator == totals.planned == tokens
    assert totals.numerator == pytest.approx(numerator.item(), rel=1e-6)
    assert step.gradients is not None
    for name in (f"decoder.layers.{layer}.mlp.router.weight" for layer in range(2)):
        (gradient,) = torch.autograd.grad(objective, leaves[name], retain_graph=True)
        assert tensor_deviation(step.gradients[name], gradient.numpy()) < 1e-5


def layer_sum(kind: str, router: Routed, config: Config) -> torch.Tensor:
    """Sums one router's loss over tokens, by microbatch of two ranks of two rows."""
    section = config.model.experts
    assert section is not None
    sums, before = [], torch.zeros(section.num_experts)
    for number in range(len(router.logits) // 4):
        rows = [list(slots(number, dp_rank, 2, 2)) for dp_rank in range(2)]
        of_rank = [router.logits[own][router.is_text[own]] for own in rows]
        if kind == "microbatch":
            alone = [replace(router, logits=each[None], is_text=torch.ones(1, len(each)) > 0) for each in of_rank]
            sums += [router_numerator(SEQUENCE_BALANCE, [each], section) * each.is_text.sum() for each in alone]
            continue
        scores = torch.cat(of_rank).softmax(-1)
        before = before + torch.zeros_like(scores).scatter(1, scores.topk(section.top_k).indices, 1.0).sum(0)
        sums.append((scores @ (before / before.sum())).sum() * section.num_experts)
    return torch.stack(sums).sum()
