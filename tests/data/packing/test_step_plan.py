"""Rows of a step on their ranks."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtrain.base.errors import DataError
from mtrain.data.packing.step_plan import FILLER, StepPlan, StepShape, plan_step
from tests.config.samples import config
from tests.fault_table import Notice
from tests.messages import refuses

WIDTH = 32
LENGTHS = st.lists(st.integers(0, WIDTH), max_size=60)
SHAPES = st.builds(
    StepShape,
    row_width=st.just(WIDTH),
    micro_batch_size=st.integers(1, 3),
    dp_size=st.integers(1, 5),
    hidden_size=st.sampled_from([1, 64]),
    multiple_of=st.integers(1, 3),
)


def plan(lengths: list[int], shape: StepShape) -> StepPlan:
    return plan_step(np.array(lengths, np.int64), shape)


def all_rows(plan: StepPlan, shape: StepShape) -> list[tuple[int, ...]]:
    return [
        row
        for microbatch in range(plan.num_microbatches)
        for rank in range(shape.dp_size)
        for row in plan.rows(microbatch, rank)
    ]


@settings(max_examples=200)
@given(LENGTHS, SHAPES)
@example([], StepShape(WIDTH, 1, 2, 8))
@example([0, 0], StepShape(WIDTH, 1, 2, 8, multiple_of=2))
def test_every_sample_lies_in_one_row_of_one_rank(lengths: list[int], shape: StepShape) -> None:
    rows = all_rows(plan(lengths, shape), shape)
    assert sorted(slot for row in rows for slot in row) == np.flatnonzero(lengths).tolist()
    assert max(sum(lengths[slot] for slot in row) for row in rows) <= WIDTH


@settings(max_examples=200)
@given(LENGTHS, SHAPES)
@example([], StepShape(WIDTH, 1, 2, 8, multiple_of=3))
def test_ranks_have_equally_many_rows_and_no_more_than_needed(lengths: list[int], shape: StepShape) -> None:
    planned = plan(lengths, shape)
    rows = all_rows(planned, shape)
    assert len(rows) == planned.num_microbatches * shape.dp_size * shape.micro_batch_size
    assert planned.num_microbatches > 0
    assert planned.num_microbatches % shape.multiple_of == 0
    fewer = (planned.num_microbatches - shape.multiple_of) * shape.dp_size * shape.micro_batch_size
    assert fewer < max(1, sum(row != FILLER for row in rows))


@settings(max_examples=100)
@given(LENGTHS, SHAPES, SHAPES)
def test_rows_do_not_depend_on_ranks_or_microbatches(lengths: list[int], one: StepShape, other: StepShape) -> None:
    rows = [sorted(row for row in all_rows(plan(lengths, shape), shape) if row != FILLER) for shape in (one, other)]
    assert rows[0] == rows[1]


@pytest.mark.fault(
    "input",
    "a sample longer than a packed row",
    happens="refused: which one, its length, and the keys to raise",
    exit_code=3,
)
def test_a_sample_longer_than_a_row_is_refused(notice: Notice) -> None:
    with notice, refuses(DataError, "sample 1", "33", "32"):
        plan([1, 33], StepShape(WIDTH, 1, 1, 8))


def test_the_shape_of_a_step_follows_from_the_configuration() -> None:
    data = {"kind": "mock", "seq_length": 64, "isolate_documents": True, "packing": {}}
    changes = {"train__tokens_per_micro_batch": 256, "layout": {"pp": 2, "vpp": 2}}
    wide = StepShape(row_width=256, micro_batch_size=1, dp_size=3, hidden_size=64, multiple_of=2)
    assert StepShape.of(config(data=data, **changes), dp_size=3) == wide
    narrow = StepShape(row_width=64, micro_batch_size=4, dp_size=1, hidden_size=64)
    assert StepShape.of(config(data=data, train__micro_batch_size=4), dp_size=1) == narrow
