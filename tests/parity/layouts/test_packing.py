"""Samples that share rows train as samples in rows of their own, whatever the layout."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest

from mtrain.config.schema.loss import Aggregation
from mtrain.core.batch.sample import Sample
from tests.parity.batches import SEQ, VOCAB, GlobalBatch
from tests.parity.cases import SINGLE, Case, case
from tests.parity.compare import at_night, between, deviation, initial_parameters, relative, run_oracle
from tests.parity.expert_models import MIXTRAL
from tests.parity.families import DEEPSEEK_ATTENTION
from tests.parity.models.test_balance import SIGMOID
from tests.parity.objectives.test_aggregations import TOGETHER, knobs
from tests.parity.objectives.test_sequences import JUDGED
from tests.parity.packing_ranks import train_each
from tests.parity.ranks import Outcome
from tests.pool import Pool

PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}
WIDE = PACKED | {"train__tokens_per_micro_batch": 2 * SEQ}
LENGTHS = [32, 3, 1, 0, 7, 12, 20, 5, 9, 31, 2, 16, 4, 11, 6, 8]
"""Number of positions of each sample: one fills a row, one has no text."""
ALL = {aggregation: knobs(aggregation) for aggregation in get_args(Aggregation)}
COUNTED = {name: ALL[name] | {"loss__empty_sequences": "include"} for name in ("seq-mean-token-sum",)}
ROUTED = MIXTRAL | {"loss__router": {"z_coefficient": 0.5, "sequence_balance_coefficient": 2.0}}
AHEAD: dict[str, Any] = {"model__mtp_depths": 2, "loss__mtp_coefficient": 0.7}
SEEN: dict[str, Any] = {"model__sliding_window": 3, "model__attention_sinks": True}


@cache
def steps(seed: int = 13, all_have_text: bool = False) -> list[GlobalBatch]:
    """Draws conversations of ragged lengths, weights of samples and of tokens; some have nothing to learn."""
    rng = np.random.default_rng(seed)
    lengths = [LENGTHS, LENGTHS[5:] + LENGTHS[:5]]
    if all_have_text:
        lengths = [[max(2, length) for length in each] for each in lengths]
    return [[conversation(rng, length, slot) for slot, length in enumerate(each)] for each in lengths]


def conversation(rng: np.random.Generator, length: int, slot: int) -> Sample:
    ids = rng.integers(1, VOCAB, length + 1)
    mask = (rng.random(length) < (0.0, 0.3, 0.7, 1.0)[slot % 4]) * rng.choice([1.0, 0.5, 0.25], length)
    return Sample(ids[:-1], ids[1:], mask, float(rng.choice([1.0, 0.25, 2.5, 0.75])))


def outcomes(
    pool: Pool, case: Case, changes: list[dict[str, Any]], batches: list[GlobalBatch] | None = None
) -> list[Outcome]:
    """Runs each configuration; all ranks report the same."""
    configs = [case.config(**each) for each in changes]
    given = steps() if batches is None else batches
    everyone = pool.run(train_each, case.resolved(configs[0]), configs, initial_parameters(configs[0]), given)
    reports = [[[step._replace(gradients=None) for step in outcome.steps] for outcome in found] for found in everyone]
    assert all(report == reports[0] for report in reports)
    found: list[Outcome] = everyone[0]
    return found


AGGREGATED = [*ALL.values(), *COUNTED.values()]
CUT = [
    case(2, num_layers=2),
    case(4, num_layers=2, cp=4),
    case(2, num_layers=2, cp=2, pp=2),
    case(4, num_layers=2, tp=2, dp=2),
    case(2, pp=2, vpp=2, dp=2),
    case(4, num_layers=2, tp=2, sp=True, cp=2, cp_comm="ulysses"),
]


@pytest.mark.nightly  # the day has all of them as terms of one run
@pytest.mark.parametrize(
    ("case", "changes"), [(each, AGGREGATED[i % 2 :: 2]) for i, each in enumerate(CUT)], ids=[*map(str, CUT)]
)
def test_packed_rows_are_rows_of_one_sample_in_every_aggregation(
    pool: Pool, case: Case, changes: list[dict[str, Any]]
) -> None:
    """Tests half of the aggregations per layout, so that each meets three layouts, with context and data
    parallelism."""
    batches = steps()[:1]
    packed = outcomes(pool, case, [PACKED | each for each in changes], batches)
    for each, found in zip(changes, packed, strict=True):
        config = case.config(**each)
        deviation(found, run_oracle(config, batches), config).assert_below()


@pytest.mark.parametrize(
    "case",
    [case(2, num_layers=2, cp=2, dp=2), at_night(case(4, num_layers=2, tp=2, sp=True, pp=2))],
    ids=str,
)
def test_packed_rows_are_rows_of_one_sample_in_all_aggregations_at_once(pool: Pool, case: Case) -> None:
    batches, config = steps()[:1], case.config(**TOGETHER)
    (found,) = outcomes(pool, case, [PACKED | TOGETHER], batches)
    exact = run_oracle(config, batches)
    deviation(found, exact, config).assert_below()
    for term, total in found.steps[0].terms.items():
        assert relative(total.mean, exact[0].means[term]) < 1e-5, term


MODELS: dict[str, tuple[Case, list[dict[str, Any]]]] = {
    "experts and their losses": (
        case(4, num_layers=2, cp=2, ep=2),
        [ROUTED | {"train__recompute": "full"}],
    ),
    "experts and their losses on data-parallel ranks": (case(2, num_layers=2, cp=2, dp=2, ep=2), [ROUTED]),
    "experts over tensor ranks": (case(2, num_layers=2, tp=2, sp=True, pp=2, ep=2), [SIGMOID]),
    "tokens ahead": (case(4, num_layers=2, cp=2), [AHEAD | {"loss__aggregation": "seq-mean-token-sqrt"}]),
    "tokens ahead in a pipeline": (case(2, num_layers=2, cp=2, pp=2), [AHEAD]),
    "tokens ahead of experts": (case(4, num_layers=2, tp=2, sp=True, cp=2), [ROUTED | AHEAD]),
    "latent attention": (case(2, num_layers=2, cp=2), [DEEPSEEK_ATTENTION]),
    "windows and sinks": (case(2, num_layers=2, cp=2, cp_comm="ulysses"), [SEEN]),
    "windows and sinks of gathered rows": (case(2, num_layers=2, cp=4), [SEEN]),
    "losses of sequences": (case(2, num_layers=2, cp=2, dp=2), [JUDGED | {"loss__empty_sequences": "include"}]),
    "losses of sequences with text": (case(2, num_layers=2, cp=2, dp=2), [JUDGED]),
}
DAY = ("experts and their losses", "tokens ahead", "windows and sinks", "losses of sequences")
"""Models by day with isolated documents, on which a packed row depends; latents, sinks of gathered rows and experts
over tensor ranks are in test_families.py and test_latent_attention.py."""


@pytest.mark.parametrize("name", [name if name in DAY else at_night(name) for name in MODELS])
def test_packed_rows_train_every_model_as_samples_alone_do(pool: Pool, name: str) -> None:
    case, changes = MODELS[name]
    # the oracle's routers and latents are not written for conversations without text
    batches = steps(all_have_text="experts" in name or "latent" in name)[:1]
    for each in changes:
        (found,) = outcomes(pool, case, [PACKED | each], batches)
        config = case.config(**each)
        deviation(found, run_oracle(config, batches), config).assert_below()


@pytest.mark.parametrize(
    "case",
    [
        case(num_layers=2, cp=2, pp=2),
        *map(at_night, [case(num_layers=2, cp=2), case(num_layers=2, tp=2, sp=True, pp=2)]),
    ],
    ids=str,
)
def test_rows_may_be_wider_than_samples(pool: Pool, case: Case) -> None:
    config = case.config(**ALL["seq-mean-token-mean"])
    (found,) = outcomes(pool, case, [WIDE | ALL["seq-mean-token-mean"]], steps()[:1])
    deviation(found, run_oracle(config, steps()[:1]), config).assert_below()


def test_packed_and_unpacked_runs_of_this_program_agree(pool: Pool) -> None:
    alone, packed = outcomes(pool, case(4), [{}, PACKED])
    between(packed, alone, SINGLE.config()).assert_below()
