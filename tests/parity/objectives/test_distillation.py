"""Distillation from a frozen teacher: loss, gradient norm and every gradient equal those of one float64 process."""

from typing import Any

import pytest

from tests.parity import teacher_ranks
from tests.parity.batches import three_steps, two_steps, weighted_steps
from tests.parity.cases import SINGLE, Case, case, lean
from tests.parity.compare import (
    TEACHER_SEED,
    Row,
    assert_rows_exact,
    at_night,
    by_layout,
    deviation,
    initial_parameters,
    run_oracle,
)
from tests.pool import Pool

CASES = [
    SINGLE,
    case(2, dp=2),
    case(2, cp=2, dp=2),
    case(2, tp=2, sp=True),
    case(2, pp=2),
    case(2, pp=2, vpp=2, cp=2, cp_comm="ulysses"),
    case(4, tp=2, sp=True, pp=2),
    case(2, tp=4, dp=2),
    case(4, tp=2, cp=2, pp=2, vpp=2),
]
TEACHER: dict[str, Any] = {  # another architecture: wider, without grouped queries, with other norms and tied tables
    "model__hidden_size": 48,
    "model__ffn_hidden_size": 64,
    "model__num_query_groups": 8,
    "model__norm": "layernorm",
    "model__activation": "gelu",
    "model__linear_bias": True,
    "model__tied_embeddings": True,
}
DISTILLATION = "distillation"
NEEDED = {"loss__teacher": {"checkpoint": "not read here"}}
ALONE: dict[str, Any] = NEEDED | {"loss__function": DISTILLATION, "loss__aggregation": "seq-mean-token-mean"}
FOUR_TERMS: dict[str, Any] = NEEDED | {
    "loss__options": {"label_smoothing": 0.1},
    "loss__side_terms": {
        "kl": {
            "function": DISTILLATION,
            "options": {"direction": "reverse", "temperature": 2.0},
            "coefficient": 0.7,
            "aggregation": "seq-mean-token-sum",
        },
        "entropy": {"function": "entropy", "coefficient": -0.2},
        "z": {"function": "z_loss", "coefficient": 0.05, "aggregation": "seq-mean-token-sqrt"},
    },
}


DAY = [
    ("four terms", FOUR_TERMS, lean(case(2, tp=2, sp=True))),
    ("alone", ALONE, lean(case(cp=2, dp=2))),
    ("alone", ALONE, lean(case(pp=2, dp=2, shard="weights"))),
    ("four terms", FOUR_TERMS, lean(case(2, cp=2, dp=2, shard="weights"))),
]
RUNS = [("four terms", FOUR_TERMS, lean(each)) for each in CASES]
RUNS += [("alone", ALONE, lean(each)) for each in (SINGLE, case(cp=2, dp=2), case(tp=2, sp=True, pp=2))]
RUNS = [run for run in RUNS if run not in DAY]


@pytest.mark.parametrize(
    ("changes", "case"),
    # test_chunks.py has a teacher in a pipeline by day
    [*(run[1:] for run in DAY), *(at_night(*run[1:]) for run in RUNS)],
    ids=[f"{run[0]}-{run[2]}" for run in (*DAY, *RUNS)],
)
def test_a_teacher_is_the_same_under_every_layout(pool: Pool, changes: dict[str, Any], case: Case) -> None:
    batches, config, teacher = weighted_steps()[:2], case.config(**changes), case.config(**TEACHER)
    given = (config, initial_parameters(config), teacher, initial_parameters(teacher, TEACHER_SEED), batches)
    reports = pool.run(teacher_ranks.train_with_teacher, case.resolved(config), *given)
    assert not any(report.teacher_moved for report in reports)
    deviation(reports[0].outcome, run_oracle(config, batches, teacher), config).assert_below()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_model_that_is_its_own_teacher_has_nothing_to_learn(pool: Pool, direction: str) -> None:
    case_ = lean(CASES[4])
    config = case_.config(**{**ALONE, "loss__options": {"direction": direction}})
    given = (config, initial_parameters(config), config, initial_parameters(config), three_steps()[:1])
    (step,) = pool.run(teacher_ranks.train_with_teacher, case_.resolved(config), *given)[0].outcome.steps
    assert abs(step.loss) < 1e-6
    assert step.grad_norm < 1e-5


@pytest.mark.parametrize(("case", "is_piped"), [(case(2, tp=2), False), (case(2, pp=2), True)], ids=str)
def test_only_a_pipeline_holds_logits_and_lets_them_go(pool: Pool, case: Case, is_piped: bool) -> None:
    config = case.config(**TEACHER)
    reports = pool.run(
        teacher_ranks.held_logits,
        case.resolved(config),
        config,
        initial_parameters(config, TEACHER_SEED),
        three_steps()[0],
    )
    num_early, alive = reports[-1]
    assert num_early == (8 if is_piped else 0)
    assert alive == ([7, 6, 5, 4, 3, 2, 1, 0] if is_piped else [0] * 8)


def smoothed(smoothing: float) -> dict[str, Any]:
    """Adds label smoothing to terms of other aggregations."""
    return {
        "loss__options": {"label_smoothing": smoothing},
        "loss__side_terms": {
            "entropy": {"function": "entropy", "coefficient": -0.5, "aggregation": "sum"},
            "sharp": {"coefficient": 0.3, "aggregation": "seq-mean-token-sum-norm", "norm_length": 20},
        },
    }


SMOOTHED = [
    Row(f"smoothing {smoothing}", smoothed(smoothing), lean(each), two_steps())
    for smoothing in (0.1, 0.9)
    for each in (SINGLE, case(tp=4), case(cp=2, dp=2), case(tp=2, sp=True, pp=2))
]


SMOOTHED_BY_DAY = Row("smoothing", smoothed(0.9), lean(case(tp=2, sp=True, pp=2)), two_steps()[:1])
"""Row by day; test_chunks.py has both terms with context parallelism."""


@pytest.mark.parametrize("rows", by_layout([SMOOTHED_BY_DAY], night=SMOOTHED))
def test_label_smoothing_and_entropy(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)
