"""Several tokens predicted ahead: each depth has its own denominator, exact under every layout and over no edge.

tests/verify/reference/test_steps.py judges the oracle's depths by modules of transformers, which has no such model.
"""

from typing import Any

import numpy as np
import pytest

from tests.parity import ranks, teacher_ranks
from tests.parity.batches import (
    BATCH,
    SEQ,
    batch_of,
    documents_steps,
    padded_steps,
    three_steps,
    two_steps,
    weighted_steps,
)
from tests.parity.cases import Case, case, lean
from tests.parity.compare import (
    TEACHER_SEED,
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    deviation,
    initial_parameters,
    run_case,
    run_oracle,
)
from tests.parity.models.test_balance import SIGMOID, SOFTMAX
from tests.parity.models.test_latent_attention import LATENT
from tests.pool import Pool

ONE, TWO = {"model__mtp_depths": 1}, {"model__mtp_depths": 2}
STRONG = {"loss__mtp_coefficient": 0.7}
TIED = {"model__tied_embeddings": True}
FULL = {"train__recompute": "full"}
OVERLAP = {"train__overlap_grad_reduce": True, "train__overlap_param_gather": True}
GPT2 = {"model__norm": "layernorm", "model__activation": "gelu", "model__linear_bias": True}
EVERY_OTHER = {"model__sliding_window": 7, "model__global_attention_every": 2}
"""Pattern whose last layer attends to everything, while one more would not: depths are of the kind of the last
layer."""

ROWS: list[tuple[str, dict[str, Any], Case]] = [
    ("two", TWO, case(4)),
    ("one", ONE, case(dp=4)),
    ("two", TWO, case(2, tp=4)),
    ("two", TWO, case(2, tp=2, sp=True, dp=2)),
    ("two", TWO | STRONG, case(pp=2)),
    ("two", TWO, case(2, pp=3, stage_layers=(1, 1, 2))),
    ("one", ONE | STRONG, case(pp=2, vpp=2)),
    ("two", TWO, case(2, pp=2, vpp=2, dp=2)),
    ("two", TWO, case(2, cp=2)),
    ("two", TWO, case(2, cp=2, cp_comm="ulysses", dp=2)),
    ("two", TWO, case(2, tp=2, sp=True, cp=2, cp_comm="ring")),
    ("one", ONE, case(4, cp=4)),
    ("two", TWO, case(2, tp=2, sp=True, pp=2, cp=2)),
    ("two, tied", TWO | TIED, case(4)),
    ("two, tied", TWO | TIED, case(4, tp=2, sp=True, pp=2, dp=2)),
    ("one, tied, overlapped", ONE | TIED | OVERLAP, case(2, pp=2, vpp=2, dp=2)),
    ("two, recomputed", TWO | FULL, case(4, tp=2, sp=True, pp=2)),
    ("two, plain optimizer", TWO | {"train__distributed_optimizer": False}, case(4, pp=2, dp=2)),
    ("two, biases", TWO | GPT2 | EVERY_OTHER, case(2, tp=2, sp=True, pp=2)),
    ("one, latent", ONE | LATENT, case(2, tp=2, sp=True, pp=2)),
]
AGGREGATIONS: list[tuple[str, dict[str, Any], Case]] = [
    ("seq-mean-token-mean", {}, case(2, pp=2, dp=2)),
    ("seq-mean-token-sqrt", {"loss__empty_sequences": "include"}, case(2, cp=2)),
    ("token-sum-norm", {"loss__norm_length": 40}, case(2, tp=2, sp=True)),
]


Z_LOSS = {"loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.05}}}
DOCUMENTS = [case(), case(cp=4), case(cp=2, cp_comm="ulysses", dp=2), case(tp=2, sp=True, pp=2, cp=2)]
LEAN = [
    *(
        Row(name, changes, lean(each), two_steps()[: 2 if OVERLAP.items() <= changes.items() else 1])
        for name, changes, each in ROWS
    ),
    *(
        Row("documents", TWO | {"data__isolate_documents": True}, lean(each), documents_steps()[:1])
        for each in DOCUMENTS
    ),
    *(
        Row(name, TWO | Z_LOSS | {"loss__aggregation": name} | changes, lean(each), weighted_steps()[:1])
        for name, changes, each in AGGREGATIONS
    ),
]


DAY = [
    Row("two, tied, recomputed", TWO | TIED | FULL | STRONG, lean(case(4, tp=2, sp=True, pp=2)), two_steps()[:1]),
    Row("one, tied, overlapped", ONE | TIED | OVERLAP, lean(case(2, pp=2, vpp=2, dp=2)), two_steps()),
    Row(
        "documents",
        TWO | GPT2 | EVERY_OTHER | {"data__isolate_documents": True},
        lean(case(2, cp=2, cp_comm="ulysses", dp=2)),
        documents_steps()[:1],
    ),
    Row(
        "roots of sequences",
        TWO | Z_LOSS | {"loss__aggregation": "seq-mean-token-sqrt", "loss__empty_sequences": "include"},
        lean(case(2, cp=2)),
        weighted_steps()[:1],
    ),
]
"""Rows by day: each model and each axis once."""


@pytest.mark.parametrize("rows", by_layout(DAY, night=LEAN))
def test_depths_do_not_change_with_the_layout(pool: Pool, rows: list[Row]) -> None:
    """Checks that depths stop at the edges of documents, and are aggregated as the main term is."""
    assert_rows_exact(pool, rows)


ROUTERS = [
    Row("softmax", TWO | SOFTMAX, case(8, num_layers=2), padded_steps()),
    Row("sigmoid", TWO | SIGMOID, case(4, num_layers=2, tp=2, sp=True, dp=2, ep=2), padded_steps()),
    Row("recomputed", ONE | SIGMOID | FULL, case(8, num_layers=2, tp=2, sp=True, pp=2), padded_steps()),
]


DAY_OF_ROUTERS = Row("both", ONE | SIGMOID | FULL, case(8, num_layers=2, tp=2, sp=True, pp=2), padded_steps()[:1])
"""Row by day with a layer in each stage, and a depth with a router of its own in the last one."""


@pytest.mark.parametrize("row", [DAY_OF_ROUTERS, *map(at_night, ROUTERS)], ids=str)
@pytest.mark.nightly  # tests/verify/parity has a router of a depth by day, with its biases
def test_routers_of_depths_count_their_own_tokens(pool: Pool, row: Row) -> None:
    assert_rows_exact(pool, [row])


@pytest.mark.parametrize(
    "case",
    # the day has depths that cross the borders of chunks above
    [lean(case(pp=2, vpp=2)), *map(at_night, [lean(case()), lean(case(tp=2, sp=True, cp=2))])],
    ids=str,
)
def test_nothing_lies_so_far_ahead(pool: Pool, case: Case) -> None:
    """Has one loss token at or near the beginning: depths have a denominator of 0, or one microbatch has all of it."""
    rng = np.random.default_rng(5)
    first, second = np.eye(SEQ)[0], np.eye(SEQ)[1]
    batches = [
        batch_of(rng, [first] * BATCH, [1.0] * BATCH),
        batch_of(rng, [*[first] * (BATCH - 1), second], [1.0] * BATCH),
    ]
    config = case.config(**TWO)
    outcome = run_case(pool, case, batches, **TWO)
    deviation(outcome, run_oracle(config, batches), config).assert_below()
    found = [[step.terms[term].denominator for term in ("main", "mtp_1", "mtp_2")] for step in outcome.steps]
    assert found == [[BATCH, 0, 0], [BATCH, 1, 0]]


@pytest.mark.parametrize(
    ("teachers", "case"),
    [
        pytest.param(TWO, lean(case(tp=2)), id="of more"),
        # the day has teachers of one token in test_distillation.py, and depths in pipelines above
        pytest.param({}, lean(case(tp=2)), id="of one token", marks=pytest.mark.nightly),
        pytest.param(TWO, lean(case(pp=2, dp=2)), id="of more in a pipeline", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly  # depths next to other terms: above; a teacher: tests/parity/objectives/test_distillation.py
def test_a_teacher_looks_at_the_next_token_alone(pool: Pool, teachers: dict[str, Any], case: Case) -> None:
    changes: dict[str, Any] = ONE | {
        "loss__teacher": {"checkpoint": "not read here"},
        "loss__side_terms": {"kl": {"function": "distillation", "coefficient": 0.5}},
    }
    batches, config = two_steps(), case.config(**changes)
    teacher = case.config(**teachers)
    given = (config, initial_parameters(config), teacher, initial_parameters(teacher, TEACHER_SEED), batches)
    reports = pool.run(teacher_ranks.train_with_teacher, case.resolved(config), *given)
    assert not any(report.teacher_moved for report in reports)
    deviation(reports[0].outcome, run_oracle(config, batches, teacher), config).assert_below()


@pytest.mark.parametrize("case", [case(4, num_layers=2, tp=2, sp=True), case(4, num_layers=2, pp=2)], ids=str)
def test_the_next_token_is_predicted_alone_where_no_more_are_asked_for(pool: Pool, case: Case) -> None:
    """Checks generation's case: the same logits, bit for bit."""
    config = case.config(**TWO)
    given = (config, initial_parameters(config), three_steps()[0])
    for report in pool.run(ranks.logits_with_and_without_depths, case.resolved(config), *given):
        assert report == [(2, True, True)] * report.count((2, True, True))
        assert len(report) in (0, 4)
