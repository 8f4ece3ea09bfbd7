"""Compares what ranks send in a step, exactly, with the algorithm on paper and with the assumptions of `mtrain plan`.

M microbatches of T tokens on a rank, L layers, hidden size h, four bytes per number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest

from mtrain import arch
from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.plan.search.cost import Workload, step_cost
from tests.messages import refuses
from tests.parity.batches import BATCH, SEQ, three_steps
from tests.parity.cases import Case, case
from tests.parity.expert_models import MIXTRAL, with_experts
from tests.plan.search.test_cost import IDEAL
from tests.pool import Pool
from tests.tools.traffic_ranks import Sent, sent
from tools.bench.slots import Slot, bubble, formula
from tools.bench.traffic import of_axis

PADDING = 0.02
"""Relative size of padding: gradient buffers are filled up to a multiple of the ranks' shares."""
HIDDEN, SIZE = 32, 4


class Sizes(NamedTuple):
    """Sizes of a configuration, on one rank."""

    microbatches: int
    tokens: int
    layers: int

    @property
    def whole(self) -> float:
        """Number of bytes of the hidden states of one microbatch."""
        return float(self.tokens * HIDDEN * SIZE)


Expected = Callable[[Sizes], dict[tuple[str, str], tuple[int, float]]]
"""Function that returns the calls and bytes of each (axis, kind)."""


def sp(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
    """Counts sequence parallelism: two parts per layer, each with a gather before and a scatter after it; backward the
    same, and the inputs once more for the gradients of weights; the embedding scatters and the output layer gathers."""
    scatters, gathers = (sizes.microbatches * (each * sizes.layers + 2) for each in (4, 6))
    half = sizes.whole / 2
    return {("tp", "reduce-scatter"): (scatters, scatters * half), ("tp", "all-gather"): (gathers, gathers * half)}


def ulysses(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
    """Counts Ulysses: queries, keys, values there and outputs back, and all again in backward; half as many key
    heads."""
    calls = sizes.microbatches * sizes.layers * 8
    return {("cp", "all-to-all"): (calls, calls / 4 * (1 + 0.5 + 0.5 + 1) * sizes.whole / 2)}


def gathers(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
    """Counts all-gathers of keys and values of the whole row, with half as many heads; their gradients are
    scattered."""
    calls = sizes.microbatches * sizes.layers
    # a rank has T tokens, the row 2 T, of which it lacks one half
    each = (1 + 1) / 2 * 2 * sizes.whole / 2
    return {("cp", "all-gather"): (calls, calls * each), ("cp", "reduce-scatter"): (calls, calls * each)}


def hops(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
    """Counts ring steps: keys and values to the other rank, with half as many heads; again in backward, with
    gradients."""
    calls = sizes.microbatches * sizes.layers * (1 + 1 + 2)
    return {("cp", "send"): (calls, calls * (0.5 + 0.5) * sizes.whole)}


def stages(chunks: int) -> Expected:
    """Counts sends between the stages of two ranks: every microbatch passes each edge, forward and backward."""

    def sends(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
        calls = sizes.microbatches * (2 * chunks - 1)  # half of both directions
        return {("pp", "send"): (calls, calls * sizes.whole)}

    return sends


def nothing(sizes: Sizes) -> dict[tuple[str, str], tuple[int, float]]:
    """Counts nothing: no layer sends."""
    return {}


CASES: list[tuple[Case, Expected]] = [
    (case(8, num_layers=2, tp=2, sp=True), sp),
    (case(8, num_layers=2, cp=2), gathers),
    (case(8, num_layers=2, cp=2, cp_comm="ulysses"), ulysses),
    (case(8, num_layers=2, cp=2, cp_comm="ring"), hops),
    (case(4, num_layers=2, pp=2), stages(1)),
    (case(4, num_layers=4, pp=2, vpp=2), stages(2)),
    (case(8, num_layers=2, dp=2), nothing),
]


def sizes_of(case: Case, layout: Layout) -> Sizes:
    microbatches = BATCH // (case.micro_batch_size * layout.dp)
    return Sizes(microbatches, case.micro_batch_size * SEQ // layout.cp, case.num_layers // layout.pp)


@pytest.mark.parametrize(("case", "expected"), CASES, ids=[str(each) for each, _ in CASES])
def test_a_step_sends_what_the_algorithm_says(pool: Pool, case: Case, expected: Expected) -> None:
    config = case.config()
    layout = case.resolved(config)
    calculated = expected(sizes_of(case, layout))
    steps = [of_rank for (of_rank,) in pool.run(sent, layout, [config], three_steps()[0])]
    for rank, (found, _) in enumerate(steps):
        for key, wanted in calculated.items():
            assert (found[key].count, found[key].sent_bytes) == wanted
        _is_nothing_else(found, {axis for axis, _ in calculated} | {"world", "dp"})
        _gradients_and_parameters_travel_once(found, config, layout, rank)
        # losses, norm, flags: one sum of a short vector, exchanged with log2(ranks) others
        assert of_axis(found, "world").count == int(math.log2(layout.world_size))
        assert of_axis(found, "world").small == of_axis(found, "world").count
        if "tp" not in case.layout:
            assert sum(each.small for (axis, _), each in found.items() if axis not in ("world", "dp")) == 0
    if layout.pp > 1:
        waiting = formula(layout, sizes_of(case, layout).microbatches)
        assert bubble([step.slots for step in steps], layout) == pytest.approx(waiting, abs=1e-12)
    else:
        _as_planned(found, calculated, sizes_of(case, layout), config, layout)


def _is_nothing_else(found: Sent, axes: set[str]) -> None:
    """Checks that nothing else is sent than over these axes; over tp, losses, norms and rows of data are sent as
    well."""
    assert {axis for axis, _ in found} <= axes
    losses = {"all-reduce", "broadcast"}
    assert {kind for axis, kind in found if axis == "tp"} <= {"all-gather", "reduce-scatter"} | losses


def _gradients_and_parameters_travel_once(found: Sent, config: Config, layout: Layout, rank: int) -> None:
    """Checks for a reduce-scatter and an all-gather of all the rank's parameters, in fp32: the least that a sum
    needs."""
    size = layout.dp * layout.cp
    if size == 1:
        assert of_axis(found, "dp").sent_bytes == 0, "nobody to send to"
        return
    held = arch.parameters_on_rank(config.model, layout, layout.coordinate(rank).pp).total
    least = held * SIZE * (size - 1) / size
    for kind in ("reduce-scatter", "all-gather"):
        assert found[("dp", kind)].count == layout.vpp
        assert least <= found[("dp", kind)].sent_bytes <= least * (1 + PADDING)


def _as_planned(
    found: Sent, calculated: dict[tuple[str, str], tuple[int, float]], sizes: Sizes, config: Config, layout: Layout
) -> None:
    """Checks that `mtrain plan` counts the same bytes; it omits what embedding and output layer send over tp."""
    counted = sum(sent_bytes for _, sent_bytes in calculated.values()) + of_axis(found, "dp").sent_bytes
    if layout.tp > 1:
        counted -= 4 * sizes.microbatches * sizes.whole / 2
    planned = step_cost(Workload(config, layout, IDEAL)).sent.nvlink_bytes
    assert planned <= counted <= planned * (1 + PADDING)


def test_tensor_parallelism_without_divided_sequences_sums_twice_a_layer_and_direction(pool: Pool) -> None:
    one = case(8, num_layers=2, tp=2)
    config, layout = one.config(), Layout(tp=2)
    sizes = sizes_of(one, layout)
    for ((found, _),) in pool.run(sent, layout, [config], three_steps()[0]):
        sums = found[("tp", "all-reduce")]
        wanted = sizes.microbatches * (4 * sizes.layers + 2)
        assert sums.count - sums.small == wanted
        assert sums.sent_bytes == pytest.approx(wanted * sizes.whole, rel=0.01)  # and some numbers of the losses
        ends = 2 * sizes.microbatches * sizes.whole
        assert step_cost(Workload(config, layout, IDEAL)).sent.nvlink_bytes == wanted * sizes.whole - ends


def test_experts_exchange_tokens_and_their_scores(pool: Pool) -> None:
    """Checks both directions, forward and backward; loads are uneven, so bytes match an even one's within 10 %, and a
    capacity's exactly."""
    factor, permitted = 1.5, {"loss__allow_layout_dependent": True}
    one = case(8, num_layers=2, dp=2, ep=2)
    even, full = one.config(**MIXTRAL), one.config(**with_experts(MIXTRAL, capacity_factor=factor), **permitted)
    exchanged, rows = 0.0, 8 * SEQ * 2  # two copies of each token
    for found, padded in pool.run(sent, one.resolved(even), [even, full], three_steps()[0]):
        exchanges = found[0][("ep", "all-to-all")]
        assert exchanges.count == 2 * (4 + 2)
        exchanged += exchanges.sent_bytes / 2
        assert padded[0][("ep", "all-to-all")].sent_bytes == 2 * (4 * HIDDEN + 2) * SIZE * factor * rows / 2
    assert exchanged == pytest.approx(2 * 4 * rows * HIDDEN * SIZE / 2, rel=0.1)


def test_ranks_that_wait_in_a_circle_are_refused() -> None:
    forward, backward = Slot(True, 0, 0), Slot(False, 1, 0)
    with refuses(ValueError):
        bubble([[backward._replace(stage=0), forward], [Slot(True, 1, 0), backward]], Layout(pp=2))


def test_a_bubble_of_four_ranks_by_hand() -> None:
    """Runs all forward passes of three microbatches first: ranks wait three forward and three backward slots."""
    ranks = [[Slot(kind, stage, number) for kind in (True, False) for number in range(3)] for stage in range(4)]
    assert bubble(ranks, Layout(pp=4)) == pytest.approx(9 / 18)


def test_a_bubble_of_uneven_slots_by_hand() -> None:
    """Has two ranks, two microbatches, a second stage that is twice as slow: 1 to fill, 1 to drain, and it never
    waits."""
    forward = [[Slot(True, stage, number) for number in range(2)] for stage in range(2)]
    assert bubble(forward, Layout(pp=2), [[1.0, 1.0], [2.0, 2.0]]) == pytest.approx(1 - 3 / 5)
