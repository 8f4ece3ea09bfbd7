"""Loss of each source of a blend: equal to the loss of its samples alone, whatever the layout, the rows and the
chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtrain.config import Config
from tests.parity.batches import SEQ
from tests.parity.cases import Case, case
from tests.parity.compare import TOLERANCE, at_night, initial_parameters
from tests.parity.layouts.test_packing import PACKED, steps
from tests.parity.objectives.test_aggregations import knobs
from tests.parity.ranks import totals_by_source
from tests.pool import Pool
from tests.reference import evaluate

NUM_SOURCES = 4
SOURCES = [0, 2, 0, 2, 2, 0, 2, 1, 1, 0, 2, None, 0, 0, 2, 1]
"""Source of each sample; no sample has source 3, and one has no source."""
BLEND: dict[str, Any] = {
    "data__kind": "sft",
    "data__tokenizer": "words",
    "data__train": [{"path": f"{name}.jsonl"} for name in ("web", "code", "books", "rare")],
}
PACKED_BLEND = BLEND | {"data__packing": PACKED["data__packing"]}
RUNS = [
    PACKED_BLEND,
    PACKED_BLEND | knobs("seq-mean-token-mean") | {"loss__chunk_tokens": 5},
    BLEND | knobs("sum") | {"loss__chunk_tokens": "whole"},
    PACKED_BLEND | knobs("seq-mean-token-sum") | {"loss__function": "tests.parity.losses:preference"},
    BLEND | {"loss__function": "tests.parity.losses:times"},
]
"""Configurations with rows of several samples and of one; chunks of tokens, one in place of the logits, none; a loss of
sequences. The last one makes a pair of its own, which has no losses by source."""
RUNS[3]["loss__options"] = {"slope": 0.3}
RUNS[4]["loss__options"] = {"factor": 2.0}


@pytest.mark.parametrize(
    "layout",
    [
        case(8, num_layers=2, pp=2, cp=2),
        # dp is summed over as cp is, and tensor ranks have the same tokens
        *map(at_night, [case(4, num_layers=2, tp=2, sp=True, cp=2), case(4, num_layers=2, pp=2, dp=2)]),
    ],
    ids=str,
)
def test_each_source_has_the_loss_of_its_own_samples(pool: Pool, layout: Case) -> None:
    batch = [replace(sample, source=source) for sample, source in zip(steps()[0], SOURCES, strict=True)]
    configs = [layout.config(**changes) for changes in RUNS]
    parameters = initial_parameters(configs[0])
    ranks = pool.run(totals_by_source, layout.resolved(configs[0]), configs, parameters, batch)
    assert all(found == ranks[0] for found in ranks)
    *with_sources, without_sources = ranks[0]
    assert without_sources == ()
    for config, found in zip(configs, with_sources):
        assert len(found) == NUM_SOURCES
        for source, totals in enumerate(found):
            own = [sample for sample in batch if sample.source == source]
            if not own:
                is_constant = config.loss.aggregation == "sum"
                assert (totals.numerator, totals.denominator) == (0, 1.0 if is_constant else 0)
                continue
            exact = evaluate(config, parameters, own).terms["main"]
            assert totals.denominator == pytest.approx(exact.denominator, rel=1e-12)
            assert totals.numerator == pytest.approx(exact.numerator.item(), rel=TOLERANCE)


def test_a_source_is_named_by_the_end_of_its_path() -> None:
    def names(*paths: str) -> tuple[str, ...]:
        sources = [{"path": path} for path in paths]
        return case().config(**BLEND | {"data__train": sources, "data__seq_length": SEQ}).data.source_names

    assert names("/data/web.jsonl") == ()
    assert names("/data/web.jsonl", "code") == ("web.jsonl", "code")
    assert names("/old/chat/a", "/new/chat/a", "b") == ("old/chat/a", "new/chat/a", "b")
    assert names("a", "b", "a") == ("a (0)", "b", "a (2)")


def test_a_blend_that_comes_later_has_names_too() -> None:
    later = {"data__curriculum": [{"from_step": 1, "sources": [{"path": "late"}, {"path": "web.jsonl"}]}]}
    config: Config = case().config(**BLEND | later)
    assert config.data.source_names == ("web.jsonl", "code.jsonl", "books.jsonl", "rare.jsonl", "late")
