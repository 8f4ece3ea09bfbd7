"""Faults of megatron-core 0.16.1 that raise no error: each shown in plain Megatron-Core, and absent here.

When an upgrade fixes one, its test fails: then the workaround that the test names can go.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from mtrain.core.ranks.groups import Groups
from tests.known_issues.plain import PlainStep, plain_initial_weights, plain_step
from tests.parity.batches import GlobalBatch, full_batch, three_steps
from tests.parity.cases import Case, case
from tests.parity.compare import deviation, initial_parameters, relative, run_case, run_oracle, tensor_deviation
from tests.pool import Pool
from tests.reference import StepResult

WHOLE_TABLE = {"model__vocab_size": 64, "model__vocab_multiple": 8}
"""Vocabulary without padding, which Megatron-Core's softmax would include."""
INTERLEAVED = case(2, pp=2, vpp=2)


OF_THEIRS = pytest.mark.nightly
"""Mark of megatron-core's faults, of the version that a test by day names (test_table.py); the parity of these layouts,
and the tests that the rows name besides these, show by day that they are absent here."""


def run_plain(pool: Pool, one: Case, batch: GlobalBatch, *fields: dict[str, Any]) -> list[list[PlainStep]]:
    """Runs the steps of all ranks, with each of several sets of fields."""
    config = one.config(**WHOLE_TABLE)
    arguments = (config.model, initial_parameters(config), batch, one.micro_batch_size)
    ranks = pool.run(plain_steps_with, one.resolved(config), *arguments, fields)
    return [list(steps) for steps in zip(*ranks, strict=True)]


def plain_steps_with(
    groups: Groups, model: Any, parameters: Any, batch: GlobalBatch, size: int, fields: Sequence[dict[str, Any]]
) -> list[PlainStep]:
    """Runs `plain_step` without keywords, which `Pool.run` does not pass."""
    return [plain_step(groups, model, parameters, batch, size, **each) for each in fields]


def oracle_of(one: Case, batch: GlobalBatch) -> StepResult:
    return run_oracle(one.config(**WHOLE_TABLE), [batch])[0]


def worst_of_ranks(steps: list[PlainStep], exact: StepResult) -> float:
    """Returns the worst relative deviation of a gradient over pipeline ranks that hold whole tensors."""
    found = {name: value for step in steps for name, value in step.gradients.items()}
    assert found.keys() == exact.gradients.keys()
    return max(tensor_deviation(found[name], value.numpy()) for name, value in exact.gradients.items())


def assert_ours_is_exact(pool: Pool, one: Case, batch: GlobalBatch) -> None:
    config = one.config(**WHOLE_TABLE)
    outcome = run_case(pool, one, [batch], **WHOLE_TABLE)
    deviation(outcome, run_oracle(config, [batch]), config).assert_below()


PER_TOKEN = {"calculate_per_token_loss": True}


@pytest.mark.parametrize(  # by day the layout of the test below that runs by day
    "one",
    [case(4, 2, dp=2), *(pytest.param(each, marks=OF_THEIRS) for each in (case(8, 2), case(4, 2, pp=2)))],
    ids=str,
)
def test_plain_megatron_agrees_where_nothing_is_wrong(pool: Pool, one: Case) -> None:
    """Shows that the deviations below come from the fault, not from the comparison."""
    batch = three_steps()[0]
    (steps,) = run_plain(pool, one, batch, PER_TOKEN)
    assert worst_of_ranks(steps, oracle_of(one, batch)) < 1e-5
    assert relative(steps[-1].loss, oracle_of(one, batch).loss) < 1e-5


@OF_THEIRS
def test_batched_transfers_pair_activations_with_gradients_at_pp_2(pool: Pool) -> None:
    """Shows a fault that is absent here: `batch_p2p_comm` is off with virtual stages
    (mcore/model/transformer_config.py)."""
    batch = three_steps()[0]
    separate = {"batch_p2p_comm": False, "overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}
    steps, fixed = run_plain(pool, INTERLEAVED, batch, PER_TOKEN, PER_TOKEN | separate)
    assert worst_of_ranks(steps, oracle_of(INTERLEAVED, batch)) > 0.01
    assert worst_of_ranks(fixed, oracle_of(INTERLEAVED, batch)) < 1e-5
    assert_ours_is_exact(pool, INTERLEAVED, batch)


@OF_THEIRS
def test_activations_are_freed_while_they_are_being_sent(pool: Pool) -> None:
    """Shows a race (`test_freed_outputs_arrive_as_other_numbers` shows other numbers).

    It is absent here: `deallocate_pipeline_outputs` is off on CPUs (mtrain/core/layers/transformer_config.py); on a GPU
    the stream keeps the order."""
    config = INTERLEAVED.config(**WHOLE_TABLE)
    arguments = (config.model, initial_parameters(config), three_steps()[0], INTERLEAVED.micro_batch_size)
    ranks = pool.run(freed_and_kept, INTERLEAVED.resolved(config), *arguments)
    assert min(freed for freed, _ in ranks) > 0, "each stage sends, and frees what it sends"
    assert [kept for _, kept in ranks] == [0, 0]


def freed_and_kept(groups: Groups, model: Any, parameters: Any, batch: GlobalBatch, size: int) -> tuple[int, int]:
    """Counts tensors freed in flight where outputs are deallocated, and where they are not."""
    given = (groups, model, parameters, batch, size)
    return freed_in_flight(*given, True), freed_in_flight(*given, False)


def freed_in_flight(
    groups: Groups, model: Any, parameters: Any, batch: GlobalBatch, size: int, deallocates: bool
) -> int:
    """Counts the tensors that a plain step frees between the start of their transfer and the wait for its end."""
    in_flight: list[int] = []
    freed = 0
    isend = torch.distributed.isend

    class Transfer:
        def __init__(self, work: Any, address: int) -> None:
            self.work, self.address = work, address

        def wait(self) -> None:
            self.work.wait()
            in_flight.remove(self.address)

    def recorded(tensor: Tensor, **named: Any) -> Transfer:
        in_flight.append(tensor.data_ptr())
        return Transfer(isend(tensor, **named), tensor.data_ptr())

    def counted(out: Tensor | None, given: bool = False) -> None:
        nonlocal freed
        freed += given and out is not None and out.data_ptr() in in_flight
        # nothing is freed here: the transfer would read it

    separate = {"batch_p2p_comm": False, "overlap_p2p_comm": True, "calculate_per_token_loss": True}
    with (
        mock.patch.object(torch.distributed, "isend", recorded),
        mock.patch.object(schedules, "deallocate_output_tensor", counted),
        mock.patch.object(schedules, "custom_backward", torch.autograd.backward),
    ):
        plain_step(groups, model, parameters, batch, size, deallocate_pipeline_outputs=deallocates, **separate)
    return freed


@OF_THEIRS
def test_weights_without_their_initialisation_miss_in_the_norm(pool: Pool) -> None:
    """Shows a fault that is absent here: perform_initialization stays on (mcore/model/transformer_config.py)."""
    batch, one = three_steps()[0], case(8, 2, tp=2)
    exact = oracle_of(one, batch).grad_norm
    each = ({**PER_TOKEN, "perform_initialization": initialised} for initialised in (True, False))
    good, bad = (steps[0].grad_norm for steps in run_plain(pool, one, batch, *each))
    assert relative(good, exact) < 1e-5
    assert bad < 0.99 * exact
    assert_ours_is_exact(pool, one, batch)


@pytest.mark.parametrize(  # microbatches and replicas are two means, of which dp = 2 has both
    "one",
    [case(4, 2, dp=2), *(pytest.param(each, marks=pytest.mark.nightly) for each in (case(4, 2), case(4, 2, pp=2)))],
    ids=str,
)
def test_the_default_is_a_mean_of_means(pool: Pool, one: Case) -> None:
    """Shows gradients that depend on the split while the logged loss agrees. Absent here: sums, divided once."""
    ragged, even = three_steps()[0], full_batch()
    (steps,), exact = run_plain(pool, one, ragged, {}), oracle_of(one, ragged)
    assert relative(steps[-1].loss, exact.loss) < 1e-5
    assert relative(steps[0].grad_norm, exact.grad_norm) > 0.01
    assert worst_of_ranks(steps, exact) > 0.01
    assert worst_of_ranks(run_plain(pool, one, even, {})[0], oracle_of(one, even)) < 1e-5
    assert_ours_is_exact(pool, one, ragged)


@OF_THEIRS
def test_initial_weights_depend_on_the_pipeline(pool: Pool) -> None:
    """Shows a fault whose absence here is in tests/core/model/test_init_weights.py."""
    model = case(4).config(**WHOLE_TABLE).model
    whole, *_ = pool.run(plain_initial_weights, case(4).resolved(case(4).config()), model)
    two = case(4, pp=2)
    stages = pool.run(plain_initial_weights, two.resolved(two.config()), model)
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    assert np.abs(stages[1][name] - whole[name]).max() > 0.01


def smoothed(groups: Groups, logits: Any, labels: Any) -> tuple[list[float], list[float]]:
    """Returns label-smoothed losses by megatron-core and by torch on the whole vocabulary."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    whole: Tensor = torch.as_tensor(logits)
    own = whole.chunk(groups.layout.tp, dim=-1)[groups.tp_rank].clone()  # computed in place
    theirs = vocab_parallel_cross_entropy(own, torch.as_tensor(labels), label_smoothing=0.1)
    right = torch.nn.functional.cross_entropy(
        whole.flatten(0, 1), torch.as_tensor(labels).flatten(), label_smoothing=0.1 * 64 / 63, reduction="none"
    )
    return theirs.flatten().tolist(), right.tolist()


@OF_THEIRS
def test_label_smoothing_is_wrong_under_tensor_parallelism(pool: Pool) -> None:
    """Shows a fault that is absent here: losses come from mtrain/core/loss/vocab_parallel/logits.py."""
    rng = np.random.default_rng(0)
    logits, labels = (4 * rng.standard_normal((5, 3, 64))).astype(np.float32), rng.integers(0, 64, (5, 3))
    deviations = []
    for one in (case(4), case(4, tp=2)):
        config = one.config(**WHOLE_TABLE)
        theirs, right = pool.run(smoothed, one.resolved(config), logits, labels)[0]
        deviations.append(float(np.abs(np.array(theirs) / np.array(right) - 1).max()))
    assert deviations[0] < 1e-2 * deviations[1]
    assert deviations[1] > 0.01
