"""What the loss pairs cost a step: they travel in the collective and the read that the gradient norm needs anyway."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.core.engine.counting import Counts, Steps, Way, count_steps
from tests.parity.batches import three_steps
from tests.parity.cases import Case, case
from tests.pool import Pool

CASES = [
    case(8, num_layers=1),
    case(4, num_layers=1, dp=2),
    case(8, num_layers=1, cp=2),
    case(8, num_layers=1, tp=2, sp=True),
    case(8, num_layers=2, pp=2),
    case(4, num_layers=2, pp=2, dp=2),
    case(8, num_layers=2, tp=2, pp=2),
    case(4, pp=2, vpp=2, dp=2),
]


def by_day(*chosen: Case, of: Sequence[Case] = CASES) -> list[Any]:
    """Returns the rows of a test; those not chosen run at night only, as they repeat what the chosen ones show."""
    return [each if each in chosen else pytest.param(each, marks=pytest.mark.nightly) for each in of]


EACH_AXIS = by_day(CASES[3], CASES[5])
"""Cases of each axis but cp, which the balance of experts runs by day; virtual stages exchange what stages do."""
TWO_RANKS = by_day(CASES[1], of=[CASES[1], CASES[4], CASES[6]])
"""Cases of two ranks; precision and optimizer exchange the same on every layout."""
SIDE_TERMS = {"z": {"function": "z_loss", "coefficient": 0.1, "aggregation": "seq-mean-token-sum"}}
ONE_TERM_AND_TWO: tuple[Mapping[str, Any], ...] = ({}, {"loss__side_terms": SIDE_TERMS})
REPLICATED = {"train__distributed_optimizer": False}
ALIKE = {"loss__side_terms": {"z": {"function": "z_loss", "coefficient": 0.1}}}
OUR_READ = Counter({"mtrain/core/engine/loss_reduction.py": 1})
NORM = {("allreduce_", 1): 1}
"""The all-reduce of megatron-core's own norm, which it calls on one rank as well."""


EACH_WAY: tuple[Way, ...] = ("ours", "megatrons", "bare")
WITHOUT_MEGATRONS: tuple[Way, ...] = ("ours", "bare")
_counted: dict[str, list[list[Steps]]] = {}


def steps_of_all_ranks(
    pool: Pool, case: Case, *changes: Mapping[str, Any], ways: Sequence[Way] = EACH_WAY
) -> list[list[Steps]]:
    """Returns one report per rank for each of the changes; what was counted once is kept."""
    key = f"{case} {changes} {ways}"
    if key not in _counted:
        # whole logits, so that every sum has the size that it has in megatron-core's own step
        configs = [case.config(**{"loss__chunk_tokens": "whole", **each}) for each in changes]
        _counted[key] = pool.run(count_steps, case.resolved(configs[0]), configs, three_steps()[0], ways)
    return _counted[key]


def added_by(one: Counts, other: Counts) -> Counter[tuple[str, int]]:
    """Returns the collectives that the first has in addition to those of the second."""
    return one.collectives - other.collectives


def small(case: Case, numbers: int, stages: int = 1) -> dict[tuple[str, int], int]:
    """Returns the cost of a sum of a short vector in each of some stages: each rank swaps with log2(ranks) others."""
    size = math.prod(case.layout.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")) // stages
    assert size & (size - 1) == 0
    return {("send", numbers): size.bit_length() - 1} if size > 1 else {}


@pytest.mark.parametrize("case", EACH_AXIS, ids=str)
def test_no_collective_but_those_of_a_step_without_normalisation(pool: Pool, case: Case) -> None:
    for steps, _ in steps_of_all_ranks(pool, case, *ONE_TERM_AND_TWO):
        assert added_by(steps["ours"], steps["bare"]) == small(case, numbers=12)
        assert added_by(steps["bare"], steps["ours"]) == NORM
        assert added_by(steps["megatrons"], steps["bare"]).total() >= 2


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
@pytest.mark.nightly  # by day with an optimizer that is divided, above
def test_replicated_optimizers_need_one_as_well(pool: Pool, case: Case) -> None:
    for replicated, _ in steps_of_all_ranks(pool, case, REPLICATED, ALIKE, ways=WITHOUT_MEGATRONS):
        assert added_by(replicated["ours"], replicated["bare"]) == small(case, numbers=12)
        assert added_by(replicated["bare"], replicated["ours"]) == NORM


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_side_terms_of_the_same_denominator_cost_none(pool: Pool, case: Case) -> None:
    for _, alike in steps_of_all_ranks(pool, case, REPLICATED, ALIKE, ways=WITHOUT_MEGATRONS):
        assert added_by(alike["ours"], alike["bare"]) == small(case, numbers=15)


@pytest.mark.parametrize("case", EACH_AXIS[1:], ids=str)
def test_terms_of_several_denominators_need_them_before_the_forward_pass(pool: Pool, case: Case) -> None:
    """The sum stays within the stage. A loss function's own collectives over TP are as many as for the main term."""
    for _, steps in steps_of_all_ranks(pool, case, *ONE_TERM_AND_TWO):
        assert added_by(steps["ours"], steps["bare"]) == small(case, numbers=15) | small(
            case, numbers=2, stages=case.layout.get("pp", 1)
        )


HALF = ({"train__precision": "bf16"}, {"train__precision": "fp16"})


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_half_precision_needs_the_denominator_ahead_and_nothing_else(pool: Pool, case: Case) -> None:
    """Whether a gradient overflowed comes with the losses; bf16 sends activations of the same size."""
    for one, other in steps_of_all_ranks(pool, case, *HALF):
        assert added_by(other["ours"], one["ours"]) == small(case, numbers=1)
        assert not added_by(one["ours"], other["ours"])
        assert other["ours"].reads == one["ours"].reads


PACKED: dict[str, Any] = {"data__isolate_documents": True, "data__packing": {}}


@pytest.mark.parametrize(  # of both pp and tp: what is counted is 0 without tp, and so less than here
    "case",
    by_day(CASES[6], of=[CASES[1], CASES[2], CASES[3], CASES[6]]),
    ids=str,
)
@pytest.mark.nightly  # numbers of the documentation; the rows: tests/parity/layouts/test_packing.py
def test_packed_rows_add_two_numbers_where_ranks_do_not_read(pool: Pool, case: Case) -> None:
    """Packing costs one broadcast between hosts of TP, and none where every rank reads; a row here has one sample."""
    receives, alone = case.layout.get("tp", 1) > 1, PACKED | {"data__packing": None}
    for one, other in steps_of_all_ranks(pool, case, alone, PACKED, ways=["ours"]):
        added = added_by(other["ours"], one["ours"])
        assert added[("broadcast_", 2)] == receives
        assert other["ours"].reads == one["ours"].reads
        # each row carries one more field, the sequence of each position
        assert added.total() == 2 * receives


EXPERTS: dict[str, Any] = {
    "model__experts": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "bias_update_rate": 0.01,
    }
}


@pytest.mark.parametrize(
    "case",
    by_day(CASES[2], of=[CASES[2], CASES[3], CASES[5]]),  # tp shares rows like cp, dp shares none
    ids=str,
)
@pytest.mark.nightly  # numbers of the documentation; the terms: tests/parity/models/test_balance.py
def test_balancing_costs_the_plan_one_sum_of_counts_and_those_of_shared_rows(pool: Pool, case: Case) -> None:
    """A z-loss alone costs the plan, and moving biases one sum a step. A balance over sequences costs one sum per
    router and microbatch where ranks share rows. The host waits for none of it."""
    stages, is_shared = case.layout.get("pp", 1), "dp" not in case.layout
    biases = Counter({("allreduce_", case.num_layers // stages * 4): 1})
    alone = {"z_coefficient": 0.1}
    routers = [EXPERTS | {"loss__router": each} for each in (alone, alone | {"sequence_balance_coefficient": 0.1})]
    for one, both in steps_of_all_ranks(pool, case, *routers, ways=WITHOUT_MEGATRONS):
        planned = Counter(small(case, numbers=15) | small(case, numbers=2, stages=stages))
        assert added_by(one["ours"], one["bare"]) == planned + biases
        planned = Counter(small(case, numbers=18) | small(case, numbers=3, stages=stages))
        sums = Counter({("allreduce_", 8 * 4): case.num_layers * 2 if is_shared else 0})
        assert added_by(both["ours"], both["bare"]) == planned + biases + sums
        assert both["ours"].reads - both["bare"].reads == OUR_READ


JUDGED: dict[str, Any] = {
    "loss__function": "tests.parity.losses:preference",
    "loss__options": {"slope": 0.03},
    "loss__aggregation": "seq-mean-token-sum",
}


@pytest.mark.parametrize("case", [case(8, 1, cp=2), case(4, 1, dp=2), case(8, 2, pp=2, cp=2)], ids=str)
@pytest.mark.nightly  # numbers of the documentation; the losses: tests/parity/objectives/test_sequences.py
def test_a_loss_of_whole_sequences_costs_two_sums_of_rows_where_ranks_share_them(pool: Pool, case: Case) -> None:
    """Each microbatch costs one sum in forward and one in backward, of one number per row, on the last stage."""
    layout, is_shared = case.resolved(case.config(**JUDGED)), "cp" in case.layout
    for rank, (steps,) in enumerate(steps_of_all_ranks(pool, case, JUDGED, ways=WITHOUT_MEGATRONS)):
        is_last = layout.coordinate(rank).pp == layout.pp - 1
        sums = Counter({("allreduce_", 8): 2 * 2 if is_shared and is_last else 0})
        assert added_by(steps["ours"], steps["bare"]) == Counter(small(case, numbers=12)) + sums
        assert steps["ours"].reads - steps["bare"].reads == OUR_READ


@pytest.mark.parametrize("case", EACH_AXIS, ids=str)
def test_the_host_waits_once_and_nowhere_that_megatron_core_does_not(pool: Pool, case: Case) -> None:
    """The host waits once with one term, and with two."""
    for rank in steps_of_all_ranks(pool, case, *ONE_TERM_AND_TWO):
        for steps in rank:
            assert steps["ours"].reads - steps["megatrons"].reads == OUR_READ
            assert steps["megatrons"].reads.total() - steps["ours"].reads.total() >= 1


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_half_precision_waits_no_more(pool: Pool, case: Case) -> None:
    for steps, _ in steps_of_all_ranks(pool, case, *HALF):
        assert added_by(steps["ours"], steps["bare"]) == small(case, numbers=12)
        assert steps["ours"].reads - steps["megatrons"].reads == OUR_READ


@pytest.mark.parametrize("case", [case(8, 1, tp=2, sp=True), case(8, 1, tp=2)], ids=str)
@pytest.mark.nightly  # numbers of the documentation; by day those of a plain step, above
def test_chunks_cost_two_sums_of_their_tokens_and_nothing_else(pool: Pool, case: Case) -> None:
    """A selection makes the same calls on fewer tokens; under sequence parallelism one all-gather a microbatch less."""
    chunks = [{"loss__chunk_tokens": each} for each in ("whole", "auto", 40)]
    batch = three_steps()[0]
    num_microbatches = len(batch) // case.micro_batch_size
    for counted in steps_of_all_ranks(pool, case, *chunks, ways=["ours"]):
        whole, selected, chunked = (steps["ours"] for steps in counted)
        assert whole.reads == selected.reads == chunked.reads
        calls = [_calls(counts.collectives) for counts in (whole, selected, chunked)]
        spared = Counter({"all-gather": num_microbatches if "sp" in case.layout else 0})
        assert calls[0] - calls[1] == +spared
        assert not calls[1] - calls[0]
        in_loss = [row.mask.astype(bool).sum() for row in batch]
        size = case.micro_batch_size
        tokens = [sum(in_loss[first : first + size]) for first in range(0, len(in_loss), size)]
        further = sum(math.ceil(each / 40) - 1 for each in tokens)
        assert calls[2] - calls[1] == Counter({"allreduce_": 2 * further})
        assert further > 0


def _calls(collectives: Counter[tuple[str, int]]) -> Counter[str]:
    """Counts collectives by name, whatever their size."""
    found: Counter[str] = Counter()
    for (name, _), count in collectives.items():
        found[name] += count
    return found
