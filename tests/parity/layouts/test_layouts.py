"""The promise: the layout does not change the run.

For every layout the denominator is exact, and loss, grad-norm, every gathered gradient of two steps and the weights
after two AdamW steps are those of one process that sees the whole batch in float64, and those of the other layouts.
"""

from collections.abc import Callable
from functools import cache
from typing import get_args

import numpy as np
import pytest

from mtrain.config.schema.layout import CpComm
from mtrain.core.batch.order import slots
from mtrain.core.batch.zigzag import zigzag_index
from tests.parity.batches import BATCH, SEQ, two_steps
from tests.parity.cases import LAYOUTS, Case, affordable, case
from tests.parity.compare import between, deviation, run_case, run_oracle
from tests.parity.ranks import Outcome
from tests.pool import Pool

RUNS = [*map(affordable, LAYOUTS)]
"""Cases with few layers; docs/proof/parity.md measures LAYOUTS themselves (tests/parity/table.py)."""


@pytest.fixture(scope="module")
def one_process(pool: Pool) -> Callable[[int], Outcome]:
    """Returns the run of one float32 process, by the number of layers."""
    return cache(lambda num_layers: run_case(pool, case(num_layers=num_layers), two_steps()))


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_the_layout_does_not_change_the_run(pool: Pool, case: Case, one_process: Callable[[int], Outcome]) -> None:
    batches, config = two_steps(), case.config()
    outcome = run_case(pool, case, batches)
    deviation(outcome, run_oracle(config, batches), config).assert_below()
    between(outcome, one_process(case.num_layers), config).assert_below()


def test_every_kind_of_layout_is_there() -> None:
    layouts = [one.resolved(one.config()) for one in RUNS]
    assert len(set(map(str, RUNS))) == len(RUNS) == len(LAYOUTS) >= 24
    for name, degrees in {
        "tp": {1, 2, 4},
        "pp": {1, 2, 3, 4},
        "cp": {1, 2, 4},
        "dp": {1, 2, 4},
        "vpp": {1, 2, 4},
    }.items():
        assert {getattr(layout, name) for layout in layouts} == degrees
    assert {case.micro_batch_size for case in RUNS} == {1, 2, 4, 8}
    assert {layout.cp_comm for layout in layouts if layout.cp > 1} == {*get_args(CpComm)}
    assert {layout.sp for layout in layouts if layout.tp > 1} == {True, False}
    assert any(len(set(one.resolved(one.config()).layers_per_stage(one.num_layers))) > 1 for one in RUNS)
    assert max(layout.world_size for layout in layouts) == 8


def test_masks_range_from_nothing_to_everything() -> None:
    shares = {1 - float(sample.mask.mean()) for sample in two_steps()[0]}
    assert min(shares) == 0
    assert max(shares) == 1
    assert 0.96 < max(shares - {1.0}) < 0.97


@pytest.mark.parametrize("case", [case for case in RUNS if "dp" in case.layout], ids=str)
def test_a_data_parallel_rank_has_no_loss_tokens(case: Case) -> None:
    dp, size = case.layout["dp"], case.micro_batch_size
    count = BATCH // (dp * size)
    tokens = [
        [sum(batch[slot].mask.sum() for m in range(count) for slot in slots(m, rank, dp, size)) for rank in range(dp)]
        for batch in two_steps()
    ]
    assert any(min(step) == 0 < max(step) for step in tokens)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_context_parallel_rank_has_no_loss_tokens(cp: int) -> None:
    masks = [np.stack([sample.mask for sample in batch]) for batch in two_steps()]
    tokens = [[mask[:, zigzag_index(SEQ, cp, rank).numpy()].sum() for rank in range(cp)] for mask in masks]
    assert any(min(step) == 0 < max(step) for step in tokens)
