"""Samples that share rows train as samples in rows of their own, whatever the layout."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest

from mtrain.config.schema.loss import Aggregation
from mtrain.data.samples.sample import Sample
from tests.parity.batches import SEQ, VOCAB, GlobalBatch
from tests.parity.cases import SINGLE, Case, case
from tests.parity.compare import deviation, initial_parameters, run_oracle
from tests.parity.expert_models import MIXTRAL
from tests.parity.objectives.test_aggregations import knobs
from tests.parity.packing_ranks import train_each
from tests.parity.ranks import Outcome
from tests.pool import Pool

PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
WIDE = PACKED | {"train__tokens_per_micro_batch": 2 * SEQ}
LENGTHS = [32, 3, 1, 0, 7, 12, 20, 5, 9, 31, 2, 16, 4, 11, 6, 8]
"""Positions of each sample: one fills a row, one has no text."""
ALL = {aggregation: knobs(aggregation) for aggregation in get_args(Aggregation)}
COUNTED = {name: ALL[name] | {"loss__empty_sequences": "include"} for name in ("seq-mean-token-sum",)}
JUDGED: dict[str, Any] = {
    "loss__function": "tests.parity.losses:preference",
    "loss__options": {"slope": 0.03},
    "loss__aggregation": "seq-mean-token-sum",
}
ROUTED = MIXTRAL | {"loss__router": {"z_coefficient": 0.5, "sequence_balance_coefficient": 2.0}}
AHEAD: dict[str, Any] = {"model__mtp_depths": 2, "loss__mtp_coefficient": 0.7}
LATENT: dict[str, Any] = {
    "model__mla": {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "model__num_query_groups": 8,
}
SEEN: dict[str, Any] = {"model__sliding_window": 3, "model__attention_sinks": True}


@cache
def steps(seed: int = 13) -> list[GlobalBatch]:
    """Conversations of ragged lengths, weights of samples and of tokens; some have nothing to learn."""
    rng = np.random.default_rng(seed)
    lengths = [LENGTHS, LENGTHS[5:] + LENGTHS[:5]]
    return [[conversation(rng, length, slot) for slot, length in enumerate(each)] for each in lengths]


def conversation(rng: np.random.Generator, length: int, slot: int) -> Sample:
    ids = rng.integers(1, VOCAB, length + 1)
    mask = (rng.random(length) < (0.0, 0.3, 0.7, 1.0)[slot % 4]) * rng.choice([1.0, 0.5, 0.25], length)
    return Sample(ids[:-1], ids[1:], mask, float(rng.choice([1.0, 0.25, 2.5, 0.75])))


def outcomes(pool: Pool, case: Case, changes: list[dict[str, Any]]) -> list[Outcome]:
    """A run of each; all ranks report the same."""
    configs = [case.config(**each) for each in changes]
    everyone = pool.run(train_each, case.resolved(configs[0]), configs, initial_parameters(configs[0]), steps())
    reports = [[[step._replace(gradients=None) for step in outcome.steps] for outcome in found] for found in everyone]
    assert all(report == reports[0] for report in reports)
    found: list[Outcome] = everyone[0]
    return found


@pytest.mark.parametrize(
    "case",
    [
        case(2),
        case(cp=4),
        case(2, cp=2, pp=2),
        case(2, tp=2, dp=2),
        case(pp=2, vpp=2, dp=2),
        case(2, tp=2, sp=True, cp=2, cp_comm="ulysses"),
    ],
    ids=str,
)
def test_packed_rows_are_rows_of_one_sample_in_every_aggregation(pool: Pool, case: Case) -> None:
    changes = [*ALL.values(), *COUNTED.values()]
    packed = outcomes(pool, case, [PACKED | each for each in changes])
    for each, found in zip(changes, packed, strict=True):
        config = SINGLE.config(**each)
        deviation(found, run_oracle(config, steps()), config).assert_below()
