"""Bad steps are skipped or rolled back: what follows is the run that never had their batch, on every layout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.store.directory import load_entry
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from mtrain.data.ledger import Ledger
from mtrain.data.loader import StepLoader
from mtrain.report.metrics.jsonl import read_records
from mtrain.report.metrics.record import StepRecord
from mtrain.runs.events import EventKind, read_events
from mtrain.runs.goodput import goodput_of_run
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.pool import Pool
from tests.reference import StepResult, exact_steps
from tests.training.faults import bad_step_ranks as ranks
from tests.training.faults import numeric_fault_ranks
from tests.training.test_engine import parameters_of

NUM_STEPS = 12
BAD = 10
"""The step with the bad batch, counted from 1; a window of 8 updates lies before it."""
BAD_EARLY = 3
"""Step with the bad batch in a run of `SHORT`, where no window is needed."""
SHORT = {"train.num_steps": 5}


def config_of(run: Path, **changes: Any) -> Config:
    """Configures a vocabulary so large that many tokens occur only once in the run; the rate falls each update."""
    given = {
        "run.dir": str(run),
        "model.vocab_size": 1024,
        "model.num_layers": 2,
        "train.micro_batch_size": 2,
        "train.num_steps": NUM_STEPS,
        "optimizer.schedule": "linear",
        "optimizer.lr": 1e-3,
        "optimizer.epsilon": 1e-4,  # else a gradient near 0 would move a weight as far as a large one
        "checkpoint.interval_steps": 3,
        "loss.function": "tests.training.faults.bad_step_ranks:poisoned",
        "loss.options": {"token": bad_token(BAD)},
    }
    return configured(**{**given, **changes})


def poisoned(step: int) -> dict[str, Any]:
    """Configures a loss that is NaN in that step."""
    return {"loss.options": {"token": bad_token(step)}, "train.on_nonfinite": "skip"}


def spikes(action: str) -> dict[str, Any]:
    """Configures a loss that jumps in the bad step, and what follows."""
    options = {"token": bad_token(BAD), "factor": 100.0}
    spike = {"action": action, "window_steps": 8}
    return {
        "loss.function": "tests.training.faults.bad_step_ranks:raised",
        "loss.options": options,
        "train.on_spike": spike,
    }


@cache
def bad_token(bad: int) -> int:
    """Returns a token that the run reads in that step alone."""
    loader = StepLoader(_plain(), 0, 1)
    others = set().union(*(_tokens(loader, step) for step in range(NUM_STEPS) if step != bad - 1))
    return min(_tokens(loader, bad - 1) - others)


def _tokens(loader: StepLoader, step: int) -> set[int]:
    return {token for batch in loader.batches(step) for token in batch.tokens.flatten().tolist()}


def _plain() -> Config:
    return configured(**{"model.vocab_size": 1024, "model.num_layers": 2, "train.num_steps": NUM_STEPS})


def exact_without(config: Config, initial: dict[str, Any], left_out: set[int]) -> list[StepResult]:
    """Trains in float64 on one process with all batches but those, each update at the rate of its own number."""
    num_steps = config.train.num_steps
    loader, kept = StepLoader(config, 0, 1), [step for step in range(num_steps) if step + 1 not in left_out]
    samples = [loader.samples(step) for step in kept]
    batches = [[each for slot in range(4) if (each := of.sample(slot))] for of in samples]
    rates = [config.optimizer.lr * (1 - number / num_steps) for number in range(len(kept))]
    return exact_steps(config.model_copy(update={"loss": _plain().loss}), initial, rates, batches)


def steps_of(run: Path) -> list[StepRecord]:
    return [record for record in read_records(run / "metrics.jsonl") if isinstance(record, StepRecord)]


def assert_is_the_run_without(run: Path, config: Config, initial: dict[str, Any], left_out: set[int]) -> None:
    """Compares losses, norms, rates and the last weights with float64; each step has one record."""
    exact, records, num_steps = exact_without(config, initial, left_out), steps_of(run), config.train.num_steps
    assert [record.step for record in records] == list(range(1, num_steps + 1))
    assert {record.step for record in records if record.skipped is not None} == left_out
    made = [record for record in records if record.skipped is None]
    for record, wanted in zip(made, exact, strict=True):
        assert record.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert record.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    rates = [config.optimizer.lr * (1 - number / num_steps) for number in range(len(made))]
    assert [record.lr for record in made] == pytest.approx(rates, rel=1e-12)
    last = run / "checkpoints" / step_name(num_steps)
    for name, values in parameters_of(last).items():
        wanted_values = exact[-1].parameters[name].numpy()
        assert np.abs(values.numpy() - wanted_values).max() <= 1e-5 * np.abs(wanted_values).max(), name
    manifest = load_entry(last).manifest
    assert {each.step for each in manifest.skipped} == left_out
    ledger = Ledger(run / "ledger")
    assert set(ledger.skipped_steps()) == left_out
    assert ledger.incomplete_steps() == {}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        # the last stage tells the others as in every step, ranks of one tensor see the same loss, and those of cp add
        # up with those of dp
        pytest.param(Layout(pp=2), marks=pytest.mark.nightly),
        pytest.param(Layout(tp=2), marks=pytest.mark.nightly),
        pytest.param(Layout(cp=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.fault(
    "numbers",
    "a batch whose loss is NaN, with train.on_nonfinite=skip",
    happens="its step is left out on all ranks; the run is that of float64 without the batch (tp, pp, cp, dp)",
    exit_code=None,
)
def test_a_skipped_step_leaves_the_run_without_its_batch(
    pool: Pool, tmp_path: Path, layout: Layout, notice: Notice
) -> None:
    config = config_of(tmp_path, **poisoned(BAD_EARLY), **SHORT)
    with notice:
        outcomes = pool.run(ranks.watched, layout, config)
    for outcome in outcomes:
        assert (outcome.ending.exit_code, outcome.ending.message) == (0, "")
    assert f"warning: step {BAD_EARLY}: the loss of term 'main' is nan" in outcomes[0].ending.output
    assert outcomes[0].initial is not None
    assert_is_the_run_without(tmp_path, config, outcomes[0].initial, {BAD_EARLY})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        # the test above shows that ranks agree, tests/core/state that they load; saves in the background below
        pytest.param(Layout(tp=2), marks=pytest.mark.nightly),
        pytest.param(Layout(pp=2), marks=pytest.mark.nightly),
        pytest.param(Layout(cp=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.fault(
    "numbers",
    "a batch whose loss is a hundred times too large, with train.on_spike.action=rollback",
    happens="back to the newest good checkpoint in the same process, and on without the batch; as float64 without it",
    exit_code=None,
)
def test_a_rollback_leaves_the_run_without_the_batches_around(
    pool: Pool, tmp_path: Path, layout: Layout, notice: Notice
) -> None:
    """The margin of 1 leaves out two good batches, one of them trained already: weights go back.

    Where saves wait for the disk, the checkpoint of step 9 is published by then, and has to go.
    """
    waits = {"checkpoint.async_save": layout.tp > 1 or layout.cp > 1}
    config = config_of(tmp_path, **spikes("rollback"), **waits, **{"train.rollback_margin_steps": 1})
    with notice:
        outcomes = pool.run(ranks.watched, layout, config)
    for outcome in outcomes:
        assert (outcome.ending.exit_code, outcome.ending.message) == (0, "")
    assert f"rolling back: step {BAD}: the loss is" in outcomes[0].ending.output
    assert outcomes[0].initial is not None
    assert_is_the_run_without(tmp_path, config, outcomes[0].initial, {BAD - 1, BAD, BAD + 1})
    (event,) = [each for each in read_events(tmp_path / "events.jsonl") if each.kind == EventKind.ROLLBACK]
    assert (event.step, event.facts["from_step"]) == (6, BAD), "the checkpoint of step 9 has the margin in it"
    goodput = goodput_of_run(tmp_path)
    assert goodput is not None
    assert (goodput.lost_steps, goodput.restarts) == (BAD - 1 - 6, 0)
    assert published_steps(tmp_path / "checkpoints") == [9, 12]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(), {"train.precision": "fp16", "train.initial_loss_scale": 256.0, "model.hidden_dropout": 0.1}),
        (Layout(tp=2), {"model.hidden_dropout": 0.1, "train.on_spike": None, **SHORT}),
        (Layout(dp=2), {"train.overlap_grad_reduce": True, "train.overlap_param_gather": True}),
    ],
    ids=["fp16-dropout", "dropout-tp2", "overlap-dp2"],
)
@pytest.mark.nightly  # by day the run is that of float64 without the batch, above
def test_a_skipped_step_leaves_every_bit_of_the_state_alone(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    """Weights, moments, counters, loss scale, random states: those of a run whose loader lacks the batch."""
    num_steps = changes.get("train.num_steps", NUM_STEPS)
    bad = BAD if "train.num_steps" not in changes else BAD_EARLY
    common = {**spikes("skip"), **changes, "metrics.data_ledger": False, "optimizer.decay_steps": num_steps}
    if common["train.on_spike"] is None:
        common |= {"loss.function": "tests.training.faults.bad_step_ranks:poisoned", **poisoned(bad)}
    skipped = pool.run(ranks.standing_after, layout, config_of(tmp_path / "skipped", **common))
    shorter = config_of(tmp_path / "without", **{**common, "train.num_steps": num_steps - 1})
    without = pool.run(ranks.standing_after, layout, shorter, bad)
    assert [record.step for record in steps_of(tmp_path / "skipped") if record.skipped] == [bad]
    assert not any(record.skipped for record in steps_of(tmp_path / "without"))
    for one, other in zip(skipped, without, strict=True):
        assert (one.adam_step, one.scaler) == (other.adam_step, other.scaler)
        assert one.tensors.keys() == other.tensors.keys()
        for name, values in one.tensors.items():
            np.testing.assert_array_equal(values, other.tensors[name], err_msg=name)


@pytest.mark.fault(
    "numbers",
    "a rollback, and then the checkpoints after its next save are gone, as if a kill had come before them",
    happens="the next start leaves the same batches out; its metrics are those of the run that was not interrupted",
    exit_code=None,
)
def test_a_start_after_a_rollback_leaves_out_the_same(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    """The run stops, and its last checkpoint is taken away by hand: left is that of step 9, which was saved after the
    rollback to 6 and knows what is ahead."""
    layout, changes = Layout(), {**spikes("rollback"), "train.rollback_margin_steps": 1, "model.num_layers": 1}
    whole = config_of(tmp_path / "whole", **changes)
    (first, *_) = pool.run(numeric_fault_ranks.run, layout, whole)
    assert first.exit_code == 0
    assert published_steps(tmp_path / "whole" / "checkpoints") == [9, 12], "no save on its way survives a rollback"
    assert not list((tmp_path / "whole" / "checkpoints").glob(".*"))
    killed = config_of(tmp_path / "killed", **changes)
    pool.run(numeric_fault_ranks.run, layout, killed, f"usr1 rank=0 step={BAD + 2} phase=data")
    for step in published_steps(tmp_path / "killed" / "checkpoints"):
        if step > 9:
            (tmp_path / "killed" / "checkpoints" / step_name(step)).rename(tmp_path / "lost")
    with notice:
        (again, *_) = pool.run(numeric_fault_ranks.run, layout, killed)
    assert again.exit_code == 0
    assert "rolling back" not in again.output
    one, other = steps_of(tmp_path / "whole"), steps_of(tmp_path / "killed")
    for mine, theirs in zip(one, other, strict=True):
        for name in ("step", "loss", "grad_norm", "lr", "skipped"):
            assert getattr(mine, name) == getattr(theirs, name)


@pytest.mark.parametrize("action", ["skip", "rollback"])
@pytest.mark.fault(
    "numbers",
    "every batch is bad, with train.on_nonfinite=skip or rollback",
    happens="the run ends after train.max_bad_steps, or when no checkpoint is left to roll back to",
    exit_code=4,
)
def test_bad_steps_without_end_end_the_run(pool: Pool, tmp_path: Path, action: str, notice: Notice) -> None:
    changes = {"loss.function": "tests.parity.losses:times", "loss.options": {"factor": 1e38}}
    config = config_of(tmp_path, **changes, **{"train.on_nonfinite": action, "train.max_bad_steps": 3})
    with notice:
        endings = pool.run(numeric_fault_ranks.run, Layout(dp=2), config)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        if action == "skip":
            assert "4 of the latest 1000 steps were bad, more than train.max_bad_steps=3" in ending.message
        else:
            assert "there is no checkpoint of a step before 1 to roll back to" in ending.message


NORM = "decoder.final_layernorm.weight"


@pytest.mark.fault(
    "numbers",
    "a weight becomes NaN in a rank's memory, with train.on_nonfinite=rollback",
    happens="rank and tensor are named; back to the newest good checkpoint and on with all batches",
    exit_code=None,
)
def test_a_spoiled_weight_is_rolled_back_once(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    """The batch is not to blame, so it is trained: the run is the one without the fault."""
    layout = Layout(tp=2)
    changes = {**plain_loss(), **SHORT, "checkpoint.interval_steps": 2, "train.on_nonfinite": "rollback"}
    changes |= {"model.num_layers": 1, "train.num_steps": 4}
    sound, config = (config_of(tmp_path / name, **changes) for name in ("sound", "spoiled"))
    pool.run(numeric_fault_ranks.run, layout, sound)
    with notice:
        endings = pool.run(ranks.spoiled_once, layout, config, f"nan rank=1 step=3 phase={NORM}:0")
    assert [ending.exit_code for ending in endings] == [0, 0], endings[0].message
    assert f"{NORM}[0] is nan on rank 1" in endings[0].output
    one, other = steps_of(tmp_path / "sound"), steps_of(tmp_path / "spoiled")
    assert [(record.step, record.loss, record.skipped) for record in one] == [
        (record.step, record.loss, record.skipped) for record in other
    ]


def plain_loss() -> dict[str, Any]:
    """No batch is bad."""
    return {"loss.options": {"token": 1023, "factor": 1.0}, "loss.function": f"{ranks.__name__}:raised"}


@pytest.mark.parametrize(  # that a spoiled state is never skipped is shown by test_guard.py
    "action", [pytest.param("skip", marks=pytest.mark.nightly), "rollback"]
)
@pytest.mark.fault(
    "numbers",
    "a weight becomes NaN again and again, with train.on_nonfinite=skip or rollback",
    happens="skip stops at once, since no batch is to blame; rollback stops the second time at the same step",
    exit_code=4,
)
def test_a_weight_that_is_spoiled_again_and_again_ends_the_run(
    pool: Pool, tmp_path: Path, action: str, notice: Notice
) -> None:
    config = config_of(tmp_path, **plain_loss(), **{"train.on_nonfinite": action, "checkpoint.interval_steps": 2})
    with notice:
        endings = pool.run(numeric_fault_ranks.run, Layout(dp=2), config, f"nan rank=1 step=3 phase={NORM}:0")
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"step 4: the loss of term 'main' is nan ({NORM}[0] is nan on rank 1" in ending.message
        assert ("a second time at this step" in ending.message) == (action == "rollback")
    assert published_steps(tmp_path / "checkpoints")[-1] == 2


@pytest.mark.parametrize(  # ranks of cp add up with those of dp
    "layout", [Layout(dp=2), pytest.param(Layout(cp=2), marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.fault(
    "numbers",
    "one rank's gradient becomes NaN before ranks add theirs up",
    happens="rank, layer and parameter are named; nothing is applied",
    exit_code=4,
)
def test_the_rank_of_a_gradient_that_is_nan_is_named(
    pool: Pool, tmp_path: Path, layout: Layout, notice: Notice
) -> None:
    sizes = {"train.global_batch_size": 2, "train.micro_batch_size": 1}
    apart = {"model.megatron": {"gradient_accumulation_fusion": False}}  # hooks see no gradients that products add
    config = config_of(tmp_path, **plain_loss(), **sizes, **apart)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    with notice:
        endings = pool.run(ranks.with_hook, layout, config, 1, 2, name)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"(the gradient of {name} is not finite on rank 1, before ranks add theirs up)" in ending.message
