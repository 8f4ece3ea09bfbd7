"""Extras reach a loss function with the very tokens that they were given for, under every layout."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mtrain import ConfigError, DataError, Datum, LossFunction, NumericError
from mtrain.core.batch.datum import sample_of
from mtrain.core.loss.functions.load import extras_of
from tests.fault_table import Notice
from tests.messages import refuses
from tests.parity.batches import SEQ, VOCAB
from tests.parity.cases import SINGLE, Case, case
from tests.parity.compare import relative
from tests.pool import Pool
from tests.training import extras_ranks

PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
CHUNKS = {"loss__chunk_tokens": 5}
BOTH = [extras_ranks.scaled, extras_ranks.scaled_by_token]
LAYOUTS = [
    pytest.param(case(2, num_layers=1, cp=2), PACKED | CHUNKS, BOTH[1:], id="packed chunks"),
    # stages and replicas pass extras on like those of losses by name in tests/parity/objectives
    pytest.param(case(2, num_layers=1, tp=2, cp=2), PACKED, BOTH, id="packed", marks=pytest.mark.nightly),
    pytest.param(case(2, num_layers=2, pp=2, dp=2), CHUNKS, BOTH[1:], id="chunks", marks=pytest.mark.nightly),
]


def rollouts() -> tuple[list[Datum], list[Datum]]:
    """Says the same by weights and by extras: one number for each token, prediction or sequence."""
    rng = np.random.default_rng(4)
    weighted, given = [], []
    for slot in range(13):
        ids = rng.integers(1, VOCAB, 1 + 5 * slot % (SEQ + 1)).tolist()  # the first has nothing to predict
        mask, factors = (rng.random(len(ids)) < 0.7).astype(float), rng.integers(1, 9, len(ids)) / 4
        scale = 2.0 ** (slot % 3)
        weighted.append(Datum(ids, (mask * factors * scale).tolist()))
        per_token: Any = torch.from_numpy(factors) if slot % 2 else factors[1:]
        given.append(Datum(ids, mask.tolist(), extras={"factors": per_token, "scale": scale, "unused": 7}))
    return weighted, given


@pytest.mark.fault(
    "input",
    "an extra of a sample that is not finite, missing, or of another length than the sample",
    happens="refused before the step with the sample and the extra named; nothing is lost of other calls",
    exit_code=4,
)
@pytest.mark.parametrize(("case", "changes", "losses"), LAYOUTS)
def test_extras_lie_next_to_their_tokens(
    pool: Pool, case: Case, changes: dict[str, Any], losses: list[LossFunction], notice: Notice
) -> None:
    """Factors are powers of two and small fractions: as weights and as extras they give the same results to the bit."""
    weighted, given = rollouts()
    extras: list[dict[str, Any]] = [
        {"factors": 1, "scale": [1.0, 1.0, math.nan, 1.0]},
        {"factors": [1.0, 1e39, 1.0], "scale": 1},
        {"factors": [1.0] * 9, "scale": 1},
        {"scale": 1},
    ]
    wrong = [Datum([1, 2, 3, 4], extras=each) for each in extras]
    config = case.config(loss__aggregation="sum", **changes)
    seen = pool.run(extras_ranks.by_weights_and_extras, case.resolved(config), config, losses, weighted, given, wrong)
    assert all(each == seen[0] for each in seen)
    first = seen[0]
    assert first.weights == first.after
    for found in first.extras:
        assert relative(found.loss, first.weights.loss) < 1e-6
        assert relative(found.grad_norm, first.weights.grad_norm) < 1e-6
    alone = SINGLE.config(loss__aggregation="sum", model__num_layers=case.num_layers)
    (single,) = pool.run(
        extras_ranks.by_weights_and_extras, SINGLE.resolved(alone), alone, BOTH[:1], weighted, given, []
    )
    assert relative(single.extras[0].grad_norm, single.weights.grad_norm) < 1e-6, "of a loss that sees whole logits"
    assert relative(first.extras[-1].grad_norm, single.weights.grad_norm) < 1e-5
    kinds, messages = zip(*first.refusals, strict=True)
    with notice:
        assert kinds == (NumericError, NumericError, DataError, DataError, ConfigError)[: len(kinds)]
        assert kinds[0].exit_code == notice.exit_code
        assert messages[0].startswith("sample 2 has an extra 'scale' that is nan at place 2; all its numbers")
        assert "'factors' that is inf at place 1" in messages[1]
        assert "an extra 'factors' of shape [9]; give one number per token (4)" in messages[2]
        assert "sample 2 has the extras scale, but the loss functions need factors, scale; give factors" in messages[3]
    unmarked = "reads the extra 'factors', but no loss function of the run says that it needs it"
    assert len(messages) == 4 or unmarked in messages[4]


def test_an_option_may_ask_for_an_extra() -> None:
    loss = extras_ranks.scaled_where_asked
    assert [extras_of(each) for each in (loss, partial(loss, scale=0.0), partial(loss, scale=2.0))] == [
        (),
        (),
        ("factors",),
    ]
    assert extras_of(partial(extras_ranks.scaled)) == ("factors", "scale")


def test_what_is_not_a_number_is_refused() -> None:
    datum = Datum([1, 2, 3], extras={"reward": "high"})  # type: ignore[dict-item]
    with refuses(DataError, "sample 3", "'reward'", "'high'"):
        sample_of(datum, "sample 3", SINGLE.config())


def test_a_sequence_without_predictions_keeps_its_own_extras() -> None:
    sample = sample_of(Datum([5], extras={"advantages": [3.0], "rewards": 2}), "sample 0", SINGLE.config())
    assert {name: each.tolist() for name, each in sample.extras.items()} == {"advantages": [0.0], "rewards": [2.0]}
