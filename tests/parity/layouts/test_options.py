"""Options of the engine and of the architecture under the layouts that could break them, against the oracle."""

from typing import Any

import pytest

from tests.parity.batches import documents_steps, two_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import Row, assert_rows_exact, by_layout
from tests.pool import Pool

OVERLAP = {"train__overlap_grad_reduce": True}
OVERLAP_BOTH = OVERLAP | {"train__overlap_param_gather": True}
PLAIN_OPTIMIZER = {"train__distributed_optimizer": False}
ENGINE: list[tuple[str, dict[str, Any], Case]] = [
    ("overlapped reduction", OVERLAP, case(4, dp=2)),
    ("overlapped reduction", OVERLAP, case(2, pp=2, vpp=2, dp=2)),
    ("overlapped reduction", OVERLAP | PLAIN_OPTIMIZER, case(2, pp=2, cp=2)),
    ("overlapped reduction and gather", OVERLAP_BOTH, case(4, dp=4)),
    ("overlapped reduction and gather", OVERLAP_BOTH, case(2, pp=2, dp=2)),
    ("overlapped reduction and gather", OVERLAP_BOTH, case(2, pp=2, vpp=2, dp=2)),
    ("overlapped reduction and gather", OVERLAP_BOTH, case(4, tp=2, sp=True, cp=2)),
    ("plain optimizer", PLAIN_OPTIMIZER, case(4)),
    ("plain optimizer", PLAIN_OPTIMIZER, case(4, dp=2)),
    ("plain optimizer", PLAIN_OPTIMIZER, case(4, tp=2, sp=True, pp=2)),
    ("full recompute", {"train__recompute": "full"}, case(4)),
    ("full recompute", {"train__recompute": "full"}, case(4, tp=2, sp=True, cp=2)),
    ("full recompute", {"train__recompute": "full"}, case(4, pp=2, vpp=2)),
    ("selective recompute", {"train__recompute": "selective"}, case(4, tp=2, sp=True, pp=2)),
    ("selective recompute", {"train__recompute": "selective"}, case(4, cp=2)),
    ("recompute in a ring", {"train__recompute": "full"}, case(4, cp=2, cp_comm="ring")),
    ("selective recompute in a ring", {"train__recompute": "selective"}, case(4, tp=2, sp=True, cp=2, cp_comm="ring")),
    ("no clipping", {"optimizer__clip_grad": 0.0}, case(4, tp=2, sp=True, pp=2)),
    ("decayed norms", {"optimizer__decay_norms_and_biases": True}, case(4, tp=2, dp=2)),
]

TIED = {"model__tied_embeddings": True}
WINDOW = {"model__sliding_window": 7}
EVERY_OTHER = WINDOW | {"model__global_attention_every": 2}
QK_NORM = {"model__qk_norm": True, "model__head_dim": 16}
"""A norm over the base's 4 values can meet 4 nearly equal ones and amplify their rounding, in any layout."""
BIASES = {"model__linear_bias": True}
GPT2 = {"model__norm": "layernorm", "model__activation": "gelu"} | BIASES
HEADS = {"model__head_dim": 6, "model__num_query_groups": 8}
LLAMA3 = {"scaling": "llama3", "factor": 8.0, "original_max_positions": 32, "base": 500.0}
YARN = {"scaling": "yarn", "factor": 4.0, "original_max_positions": 16, "base": 300.0, "beta_fast": 4.0}
ARCHITECTURE: list[tuple[str, dict[str, Any], Case]] = [
    *[("tied", TIED, layout) for layout in (case(4), case(4, tp=2, sp=True), case(4, pp=2), case(4, pp=2, vpp=2))],
    *[("tied", TIED, layout) for layout in (case(4, tp=2, sp=True, pp=2, dp=2), case(4, cp=2), case(4, pp=4))],
    ("tied, plain optimizer", TIED | PLAIN_OPTIMIZER, case(4, tp=2, pp=2)),
    ("tied, overlapped", TIED | OVERLAP_BOTH, case(4, pp=2, dp=2)),
    *[("window", WINDOW, layout) for layout in (case(4), case(4, cp=2), case(4, cp=4, cp_comm="ulysses"))],
    ("window", WINDOW, case(4, cp=4)),
    ("window in every other layer", EVERY_OTHER, case(4, pp=2, vpp=2)),
    ("window in every other layer", EVERY_OTHER, case(4, cp=2, cp_comm="ulysses", dp=2)),
    ("window in every other layer", EVERY_OTHER, case(4, pp=2, first_stage_layers=1)),
    *[("QK-norm", QK_NORM, layout) for layout in (case(4, tp=2), case(4, tp=4, sp=True), case(4, cp=2, pp=2))],
    ("QK-norm", QK_NORM | {"model__norm": "layernorm"}, case(4, tp=2, sp=True, dp=2)),
    ("QK-norm and a ring", QK_NORM | BIASES, case(2, pp=2, vpp=2, cp=2, cp_comm="ring")),
    *[("biases", BIASES, layout) for layout in (case(4, tp=2), case(4, tp=4, sp=True), case(4, pp=2, cp=2))],
    ("qkv bias", {"model__qkv_bias": True}, case(4, tp=2, sp=True, cp=2, cp_comm="ulysses")),
    *[("GPT-2", GPT2, layout) for layout in (case(4), case(4, tp=2, sp=True, pp=2), case(4, cp=2))],
    ("tanh GELU", GPT2 | {"model__activation": "gelu_tanh"}, case(4, tp=2)),
    *[("head_dim", HEADS, layout) for layout in (case(4, tp=2, sp=True), case(4, cp=4, cp_comm="ulysses"))],
    ("one query group in a ring", {"model__num_query_groups": 1}, case(4, cp=2, cp_comm="ring")),
    ("one query group", {"model__num_query_groups": 1}, case(4, cp=4, cp_comm="ulysses")),
    ("llama3 rope", {"model__rope": LLAMA3}, case(4, cp=2)),
    ("llama3 rope", {"model__rope": LLAMA3}, case(4, tp=2, sp=True, pp=2)),
    ("yarn rope", {"model__rope": YARN}, case(4, cp=2, cp_comm="ulysses")),
    ("yarn rope", {"model__rope": YARN}, case(4, tp=2)),
    ("linear rope", {"model__rope": {"scaling": "linear", "factor": 2.5}}, case(4, cp=4)),
    ("vocabulary without padding", {"model__vocab_size": 64, "model__vocab_multiple": 8}, case(4, tp=4, sp=True)),
    ("a rank of padding only", {"model__vocab_multiple": 24}, case(4, tp=4)),
]

ISOLATED: dict[str, Any] = {"data__isolate_documents": True}
DOCUMENTS = [
    case(4),
    case(2, cp=2),
    case(4, cp=2, cp_comm="ulysses"),
    case(4, cp=4),
    case(2, cp=4, cp_comm="ulysses"),
    case(4, tp=2, sp=True, cp=2),
    case(2, pp=2, vpp=2, cp=2),
    case(4, tp=2, sp=True, pp=2),
    case(4, cp=2, dp=2),
]


ROWS = [
    *(Row(name, changes, lean(each), two_steps()) for name, changes, each in ENGINE),
    *(Row(name, changes, lean(each), two_steps()[:1]) for name, changes, each in ARCHITECTURE),
]
RECOMPUTED = ISOLATED | WINDOW | {"train__recompute": "full"}
SELECTIVE, FULL = {"train__recompute": "selective"}, {"train__recompute": "full"}
UNCLIPPED = {"optimizer__clip_grad": 0.0}
DECAYED = {"optimizer__decay_norms_and_biases": True}
ONE_GROUP = {"model__num_query_groups": 1}
LINEAR = {"scaling": "linear", "factor": 2.5}
DAY: list[tuple[dict[str, Any], Case]] = [
    (GPT2 | TIED | PLAIN_OPTIMIZER | UNCLIPPED, case(4, tp=2, sp=True, pp=2)),
    (
        QK_NORM | {"model__norm": "layernorm", "model__qkv_bias": True, "model__rope": LLAMA3} | SELECTIVE,
        case(4, tp=2, sp=True, pp=2),
    ),
    (EVERY_OTHER | OVERLAP_BOTH | FULL | {"model__rope": YARN}, case(4, cp=2, cp_comm="ulysses", dp=2)),
    (ONE_GROUP | OVERLAP | {"model__rope": LINEAR}, case(4, cp=2, cp_comm="ulysses", dp=2)),
    (TIED | BIASES | OVERLAP_BOTH | DECAYED, case(4, pp=2, vpp=2, dp=2)),
    (WINDOW | HEADS | PLAIN_OPTIMIZER, case(4, cp=2)),
    (ONE_GROUP | BIASES | FULL, case(4, cp=2, cp_comm="ring")),
    (GPT2 | {"model__activation": "gelu_tanh", "model__vocab_multiple": 24}, case(4, tp=4)),
]
"""Rows with every option once, combined with others that it does not touch: one wrong option makes the run wrong."""


@pytest.mark.parametrize(
    "rows",
    by_layout(
        [
            Row(
                f"together {i}", changes, lean(each), two_steps()[: 2 if OVERLAP_BOTH.items() <= changes.items() else 1]
            )
            for i, (changes, each) in enumerate(DAY)
        ],
        night=ROWS,  # the day shows each of them by DAY
    ),
)
def test_options_do_not_break_the_promise(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)


@pytest.mark.parametrize(
    "rows",
    by_layout(
        [
            Row("documents", ISOLATED, lean(case(4, tp=2, sp=True, cp=2)), documents_steps()[:1]),
            Row("window and recompute", RECOMPUTED, lean(case(4, cp=2, cp_comm="ulysses")), documents_steps()[:1]),
        ],
        # the day has either way of cp; pipelines and dp know of no documents
        night=[
            *(Row("documents", ISOLATED, lean(each), documents_steps()[:1]) for each in DOCUMENTS),
            *(Row("window and recompute", RECOMPUTED, lean(each), documents_steps()[:1]) for each in DOCUMENTS[:5]),
        ],
    ),
)
def test_documents_that_cross_every_border_of_chunks(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)
