"""Losses of whole sequences, not linear in their tokens: the same run under every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.base.errors import ConfigError
from mtrain.config.schema.loss import Aggregation
from mtrain.core.loss.pair import TermInputs, weigh_sequences
from mtrain.core.loss.vocab_parallel.logits import VocabParallelLogits
from mtrain.verify.reference.objective import Scene
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.batches import documents_steps, padded_steps, two_steps, weighted_steps
from tests.parity.cases import Case, case, lean
from tests.parity.compare import Row, assert_rows_exact, by_layout
from tests.pool import Pool
from tests.reference import USER_TERMS

PREFERENCE = "tests.parity.losses:preference"
SQUARED = "tests.parity.losses:squared_sum"
SLOPE = 0.03


def _log_probability(scene: Scene) -> Tensor:
    """Returns that of each row's answer, [batch]."""
    likely = scene.logits.log_softmax(-1).gather(-1, scene.labels.unsqueeze(-1)).squeeze(-1)
    return (likely * (scene.weights != 0)).sum(1)


def _preference(scene: Scene, slope: float) -> Tensor:
    return (scene.token_shares.sum(1) * (1 + (-slope * _log_probability(scene) - 1.0).exp()).log()).sum()


def _squared_sum(scene: Scene) -> Tensor:
    return (scene.token_shares.sum(1) * 1e-3 * _log_probability(scene) ** 2).sum()


USER_TERMS[PREFERENCE], USER_TERMS[SQUARED] = _preference, _squared_sum

JUDGED: dict[str, Any] = {
    "loss__function": PREFERENCE,
    "loss__options": {"slope": SLOPE},
    "loss__aggregation": "seq-mean-token-sum",
}
CASES = [
    case(4),
    case(1, dp=2),
    case(4, cp=2),
    case(1, cp=4),
    case(2, cp=2, cp_comm="ulysses"),
    case(4, cp=4, cp_comm="ulysses"),
    case(2, pp=2, cp=2),
    case(2, pp=2, vpp=2, cp=2),
    case(4, tp=2, sp=True, cp=2),
    case(2, cp=2, dp=2),
    case(4, tp=2, sp=True, pp=2, cp=2),
]


SPREAD: dict[str, Any] = {"loss__function": SQUARED, "loss__aggregation": "seq-mean-token-sum"}
OTHERS: list[tuple[str, dict[str, Any], list[Any], Case]] = [
    ("weighted", JUDGED, weighted_steps()[:2], case(2, cp=2, dp=2)),
    ("by tokens", JUDGED | {"loss__aggregation": "token-mean"}, two_steps(), case(2, cp=4)),
    ("empty ones included", JUDGED | {"loss__empty_sequences": "include"}, two_steps(), case(2, tp=2, cp=2)),
    ("padded", JUDGED, padded_steps(), case(4, cp=2)),
    ("documents", JUDGED | {"data__isolate_documents": True}, documents_steps(), case(2, cp=2)),
    (
        "next to tokens",
        {"loss__side_terms": {"judged": {"function": PREFERENCE, "options": {"slope": SLOPE}, "coefficient": 0.3}}},
        two_steps(),
        case(2, tp=2, sp=True, cp=2),
    ),
    ("recomputed", JUDGED | {"train__recompute": "full"}, two_steps(), case(2, pp=2, cp=2)),
    ("spread over tokens", SPREAD, two_steps(), case(2, cp=4)),
    ("spread over tokens", SPREAD, two_steps(), case(4, dp=2)),
]
ROWS = [
    *(Row("a sigmoid of a row's sum", JUDGED, lean(each), two_steps()) for each in CASES),
    *(Row(name, changes, lean(each), batches) for name, changes, batches, each in OTHERS),
]


DAY: list[tuple[str, dict[str, Any], list[Any], Case]] = [
    ("documents", JUDGED | {"data__isolate_documents": True}, documents_steps(), case(2, cp=2)),
    ("padded", JUDGED, padded_steps(), case(2, cp=2)),
    ("weighted", JUDGED, weighted_steps(), case(2, cp=2, cp_comm="ulysses", dp=2)),
    ("by tokens", JUDGED | {"loss__aggregation": "token-mean"}, two_steps(), case(2, cp=2, cp_comm="ulysses", dp=2)),
    ("next to tokens", OTHERS[5][1], two_steps(), case(2, tp=2, sp=True, cp=2)),
    (
        "empty ones included, recomputed",
        JUDGED | {"loss__empty_sequences": "include", "train__recompute": "full"},
        two_steps(),
        case(2, pp=2, vpp=2, cp=2),
    ),
    ("spread over tokens", SPREAD, two_steps(), case(2, cp=2)),
]
"""Rows by day: every kind once, every axis combined with the one that separates sequences."""


@pytest.mark.parametrize(
    "rows",
    by_layout([Row(name, changes, lean(each), batches[:1]) for name, changes, batches, each in DAY], night=ROWS),
)
def test_sequences_of_every_kind_are_those_of_one_process(pool: Pool, rows: list[Row]) -> None:
    assert_rows_exact(pool, rows)


SUMS = ["sum", "token-sum-norm"]


@pytest.mark.fault(
    "input",
    "a loss of whole sequences under an aggregation that sequences have no share of",
    happens="refused in the first step, with the aggregation to set",
    exit_code=2,
)
@pytest.mark.parametrize("aggregation", SUMS)
def test_an_aggregation_without_shares_of_sequences_is_refused(aggregation: str, notice: Notice) -> None:
    length = {"loss__norm_length": 8} if aggregation == "token-sum-norm" else {}
    config = case(4).config(**JUDGED | {"loss__aggregation": aggregation} | length)
    with notice, refuses(ConfigError, "loss.aggregation=seq-mean-token-sum") as refused:
        weigh_sequences(torch.zeros(2), inputs_of(config.loss.aggregation))
    assert refused.value.exit_code == notice.exit_code


def inputs_of(aggregation: Aggregation) -> TermInputs:
    """Makes the inputs of two sequences of three tokens."""
    logits = VocabParallelLogits(torch.zeros(3, 2, 5), None, 0, 5)
    labels, weights = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
    return TermInputs(logits, labels, weights, torch.zeros(2, 3).double(), labels, None, None, aggregation)


def test_sums_are_of_rows_and_leave_masked_tokens_out() -> None:
    inputs = inputs_of("seq-mean-token-sum")
    values = torch.tensor([[1.0, torch.inf, 3.0], [torch.nan, 5.0, 6.0]], requires_grad=True)
    total = inputs.sum_over_sequence(values)
    assert (total.tolist(), total.dtype) == ([4.0, 0.0], torch.float64)
    total.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert inputs.sequence_ids.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert total[inputs.sequence_ids].shape == (2, 3)
