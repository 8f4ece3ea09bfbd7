"""Faults of other trainers on the real model and real ranks: the naive formula fails, ours is the oracle's.

"Fails" means that the gradient is more than 1 % away in the 2-norm over all parameters. Where every token has a loss,
several naive formulas happen to be right, which shows that they are what they say. Megatron-Core's own default is in
tests/known_issues/test_whole_steps.py.
"""

from typing import Any

import numpy as np
import pytest

from tests.oracle.run import StepResult
from tests.parity.batches import GlobalBatch, full_batch, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, initial_parameters, run_case, run_oracle, without_padding
from tests.parity.naive import train_naively
from tests.pool import Pool

RAGGED, EVEN = three_steps()[0], full_batch()
SEQUENCES = {"loss__aggregation": "seq-mean-token-sum"}


def naive_gradients(pool: Pool, one: Case, batch: GlobalBatch, formula: str, **changes: Any) -> dict[str, Any]:
    """All gradients under a naive formula, without padding."""
    naive = {"loss__function": f"tests.parity.naive:{formula}", "loss__denominator": "measured"}
    config = one.config(**changes, **naive)
    arguments = (config, initial_parameters(config), [batch])
    (step,) = pool.run(train_naively, one.resolved(config), *arguments)[0].steps
    return without_padding(step.gradients, config.model.vocab_size)


def distance(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Of all gradients as one vector, relative to the second."""
    one, other = (np.concatenate([tensors[name].ravel() for name in sorted(exact)]) for tensors in (found, exact))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def oracle_gradients(step: StepResult) -> dict[str, Any]:
    return {name: value.numpy() for name, value in step.gradients.items()}


def naive_distance(pool: Pool, one: Case, batch: GlobalBatch, formula: str, **changes: Any) -> float:
    """How far a naive formula is from the oracle."""
    (exact,) = run_oracle(one.config(**changes), [batch])
    return distance(naive_gradients(pool, one, batch, formula, **changes), oracle_gradients(exact))


def assert_ours_is_exact(pool: Pool, one: Case, batch: GlobalBatch, **changes: Any) -> None:
    config = one.config(**changes)
    deviation(run_case(pool, one, [batch], **changes), run_oracle(config, [batch]), config).assert_below()


def test_verl_sequence_parallelism_with_gradient_accumulation(pool: Pool) -> None:
    """verl issue 2857: on four ranks sequence parallelism turns ranks into micro-steps, and the run changes."""
    cases = [
        case(2, num_layers=2, dp=4),
        case(2, num_layers=2, cp=2, cp_comm="ulysses", dp=2),
        case(2, num_layers=2, cp=4, cp_comm="ulysses"),
    ]
    found = [naive_gradients(pool, one, RAGGED, "mean_of_micro_steps") for one in cases]
    (exact,) = run_oracle(cases[0].config(), [RAGGED])
    assert min(distance(gradients, oracle_gradients(exact)) for gradients in found) > 0.01
    assert min(distance(found[0], found[1]), distance(found[1], found[2]), distance(found[0], found[2])) > 0.01
    both = cases[1]
    assert naive_distance(pool, both, EVEN, "mean_of_micro_steps") < 1e-5
    assert_ours_is_exact(pool, both, RAGGED)


@pytest.mark.parametrize(
    "case", [case(2, num_layers=2, dp=2), case(2, num_layers=2, cp=2, dp=2), case(4, num_layers=2, tp=2, dp=2)], ids=str
)
def test_sequence_mean_whose_denominator_is_multiplied_by_the_ranks(pool: Pool, case: Case) -> None:
    """verl pull request 5798."""
    assert naive_distance(pool, case, RAGGED, "sequences_times_ranks", **SEQUENCES) == pytest.approx(0.5, abs=1e-5)
    assert_ours_is_exact(pool, case, RAGGED, **SEQUENCES)


@pytest.mark.parametrize("case", [case(2, num_layers=2, dp=2), case(4, num_layers=2, tp=2, sp=True, pp=2)], ids=str)
def test_sequence_means_of_microbatches_with_unequal_numbers_of_sequences(pool: Pool, case: Case) -> None:
    assert naive_distance(pool, case, RAGGED, "mean_of_sequence_means", **SEQUENCES) > 0.01
    assert naive_distance(pool, case, EVEN, "mean_of_sequence_means", **SEQUENCES) < 1e-5
    assert_ours_is_exact(pool, case, RAGGED, **SEQUENCES)


@pytest.mark.parametrize(
    "case",
    [case(2, num_layers=2, cp=2), case(4, num_layers=2, cp=4, cp_comm="ulysses"), case(4, num_layers=2, tp=2, cp=2)],
    ids=str,
)
def test_sequence_mean_that_counts_a_cut_sequence_on_every_rank(pool: Pool, case: Case) -> None:
    assert naive_distance(pool, case, RAGGED, "sequences_in_sight", **SEQUENCES) > 0.01
    assert_ours_is_exact(pool, case, RAGGED, **SEQUENCES)


@pytest.mark.parametrize("sp", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_deepspeed_ulysses_gradients_are_too_large_by_the_sequence_ranks(pool: Pool, sp: int) -> None:
    """DeepSpeed issue 5248: even where every token has a loss the gradient is sp times too large."""
    one = case(4, num_layers=2, cp=sp, cp_comm="ulysses", dp=4 // sp)
    assert naive_distance(pool, one, EVEN, "mean_times_sequence_ranks") == pytest.approx(sp - 1, abs=1e-4)
    assert naive_distance(pool, one, RAGGED, "mean_times_sequence_ranks") > 0.01
    # dividing by sp as well fixes full rows only
    assert naive_distance(pool, one, EVEN, "mean_of_means") < 1e-5
    assert naive_distance(pool, one, RAGGED, "mean_of_means") > 0.01
    assert_ours_is_exact(pool, one, RAGGED)


@pytest.mark.parametrize("case", [case(8, num_layers=2, dp=2), case(4, num_layers=2, dp=4)], ids=str)
def test_torchtnt_ranks_that_hold_different_numbers_of_tokens(pool: Pool, case: Case) -> None:
    """One microbatch a rank; the wrapper averages the ranks' gradients."""
    assert naive_distance(pool, case, RAGGED, "mean_of_means") > 0.01
    assert naive_distance(pool, case, EVEN, "mean_of_means") < 1e-5
    assert_ours_is_exact(pool, case, RAGGED)
