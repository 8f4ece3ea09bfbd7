"""Faults of other trainers on the real model and real ranks: the naive formula fails, ours equals the oracle.

"Fails" means that the gradient is more than 1 % away in the 2-norm over all parameters. Where every token has a loss,
several naive formulas happen to be right, which shows that they are what they say. Megatron-Core's own default is in
tests/known_issues/test_whole_steps.py.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.parity.batches import GlobalBatch, full_batch, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import at_night, deviation, initial_parameters, run_oracle, without_padding
from tests.parity.naive import train_each_naively
from tests.parity.ranks import Outcome, Run
from tests.pool import Pool
from tests.reference import StepResult

# they show faults of others; ours equals the oracle by day in the rest of tests/parity
pytestmark = pytest.mark.nightly
RAGGED, EVEN = three_steps()[0], full_batch()
SEQUENCES = {"loss__aggregation": "seq-mean-token-sum"}


def distance(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Returns the distance of all gradients as one vector, relative to the second."""
    one, other = (np.concatenate([tensors[name].ravel() for name in sorted(exact)]) for tensors in (found, exact))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def oracle_gradients(step: StepResult) -> dict[str, Any]:
    return {name: value.numpy() for name, value in step.gradients.items()}


def naive_gradients(
    pool: Pool, one: Case, naive: Sequence[tuple[str, GlobalBatch]], **changes: Any
) -> list[dict[str, Any]]:
    """Returns all gradients under naive formulas, without padding; ours, on the same ranks, must be exact."""
    ours = one.config(**changes)
    configs = [
        one.config(**changes, loss__function=f"tests.parity.naive:{formula}", loss__denominator="measured")
        for formula, _ in naive
    ]
    batches = [*(batch for _, batch in naive), RAGGED]
    runs = [
        Run(config, initial_parameters(config), [batch])
        for config, batch in zip([*configs, ours], batches, strict=True)
    ]
    found: list[Outcome] = pool.run(train_each_naively, one.resolved(ours), runs)[0]
    deviation(found[-1], run_oracle(ours, [RAGGED]), ours).assert_below()
    return [without_padding(each.steps[0].gradients, ours.model.vocab_size) for each in found[:-1]]


def naive_distances(pool: Pool, one: Case, naive: Sequence[tuple[str, GlobalBatch]], **changes: Any) -> list[float]:
    """Returns the distance of naive formulas to the oracle, where ours is exact."""
    exact = [run_oracle(one.config(**changes), [batch])[0] for _, batch in naive]
    found = naive_gradients(pool, one, naive, **changes)
    return [distance(gradients, oracle_gradients(step)) for gradients, step in zip(found, exact, strict=True)]


def ulysses(cp: int, dp: int = 1, micro_batch_size: int = 2) -> Case:
    """Makes a case of sequence parallelism as in those trainers."""
    return case(micro_batch_size, num_layers=2, cp=cp, cp_comm="ulysses", dp=dp)


@pytest.mark.parametrize(
    "cases",
    [
        [case(4, num_layers=2, dp=2), ulysses(cp=2, micro_batch_size=4)],
        at_night([case(2, num_layers=2, dp=4), ulysses(cp=2, dp=2), ulysses(cp=4)]),
    ],
    ids=["two ranks", "four ranks"],
)
def test_verl_sequence_parallelism_with_gradient_accumulation(pool: Pool, cases: list[Case]) -> None:
    """Tests verl issue 2857: sequence parallelism makes ranks into micro-steps, and the run changes."""
    formula = "mean_of_micro_steps"
    found = [naive_gradients(pool, one, [(formula, RAGGED), (formula, EVEN)]) for one in cases]
    ragged, even = (oracle_gradients(run_oracle(cases[0].config(), [batch])[0]) for batch in (RAGGED, EVEN))
    assert min(distance(of_ragged, ragged) for of_ragged, _ in found) > 0.01
    assert min(distance(one[0], other[0]) for one, other in combinations(found, 2)) > 0.01
    assert max(distance(of_even, even) for _, of_even in found) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        case(2, num_layers=2, dp=2),
        *map(at_night, [case(2, num_layers=2, cp=2, dp=2), case(4, num_layers=2, tp=2, dp=2)]),
    ],
    ids=str,
)
def test_sequence_mean_whose_denominator_is_multiplied_by_the_ranks(pool: Pool, case: Case) -> None:
    """Tests verl pull request 5798."""
    (found,) = naive_distances(pool, case, [("sequences_times_ranks", RAGGED)], **SEQUENCES)
    assert found == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize(
    "case", [case(2, num_layers=2, dp=2), at_night(case(4, num_layers=2, tp=2, sp=True, pp=2))], ids=str
)
def test_sequence_means_of_microbatches_with_unequal_numbers_of_sequences(pool: Pool, case: Case) -> None:
    formula = "mean_of_sequence_means"
    ragged, even = naive_distances(pool, case, [(formula, RAGGED), (formula, EVEN)], **SEQUENCES)
    assert ragged > 0.01
    assert even < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        case(2, num_layers=2, cp=2),
        *map(at_night, [ulysses(cp=4, micro_batch_size=4), case(4, num_layers=2, tp=2, cp=2)]),
    ],
    ids=str,
)
def test_sequence_mean_that_counts_a_cut_sequence_on_every_rank(pool: Pool, case: Case) -> None:
    (found,) = naive_distances(pool, case, [("sequences_in_sight", RAGGED)], **SEQUENCES)
    assert found > 0.01


@pytest.mark.parametrize(
    "case",
    [
        ulysses(2, micro_batch_size=4),
        *map(at_night, [ulysses(2, 2, micro_batch_size=4), ulysses(4, micro_batch_size=4)]),
    ],
    ids=str,
)
def test_deepspeed_ulysses_gradients_are_too_large_by_the_sequence_ranks(pool: Pool, case: Case) -> None:
    """Tests DeepSpeed issue 5248: even where every token has a loss the gradient is sp times too large."""
    divided = "mean_of_means"
    naive = [(formula, batch) for formula in ("mean_times_sequence_ranks", divided) for batch in (EVEN, RAGGED)]
    even, ragged, divided_even, divided_ragged = naive_distances(pool, case, naive)
    assert even == pytest.approx(case.layout["cp"] - 1, abs=1e-4)
    assert ragged > 0.01
    # dividing by sp as well fixes full rows only
    assert divided_even < 1e-5
    assert divided_ragged > 0.01


@pytest.mark.parametrize("case", [case(8, num_layers=2, dp=2), case(4, num_layers=2, dp=4)], ids=str)
def test_torchtnt_ranks_that_hold_different_numbers_of_tokens(pool: Pool, case: Case) -> None:
    """Has one microbatch per rank; the wrapper averages the ranks' gradients."""
    ragged, even = naive_distances(pool, case, [("mean_of_means", RAGGED), ("mean_of_means", EVEN)])
    assert ragged > 0.01
    assert even < 1e-5
