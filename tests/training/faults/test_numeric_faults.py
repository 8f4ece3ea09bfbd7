"""Numeric faults in whole runs: they end with exit code 4, and good checkpoints survive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.store.directory import load_entry, verify_files
from mtrain.checkpoint.store.steps import published_steps, step_name
from mtrain.config import Config
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import numeric_fault_ranks as ranks
from tests.training.test_trainer import records

OVERFLOWING = {
    "train.precision": "fp16",
    "loss.function": "tests.parity.losses:times",
    "loss.options": {"factor": 1e12},
}
"""Gradients that overflow in fp16 at every loss scale."""


def run_config(run: Path, **changes: Any) -> Config:
    """Configures a run of five steps that saves after every second one."""
    sizes = {"model.num_layers": 2, "train.micro_batch_size": 2, "train.num_steps": 5}
    return configured(**{"run.dir": str(run), "checkpoint.interval_steps": 2, **sizes, **changes})


@pytest.mark.parametrize(
    ("changes", "skipped", "scale"),
    [({"train.max_skipped_steps": 3}, 3, "16384"), ({"train.initial_loss_scale": 4.0}, 5, "1")],
    ids=["limit", "smallest scale"],
)
@pytest.mark.fault(
    "numbers",
    "fp16: the gradients of every step overflow",
    happens="the run ends after train.max_skipped_steps in a row, or two at the smallest loss scale",
    exit_code=4,
)
def test_fp16_that_skips_every_step_ends(
    pool: Pool, tmp_path: Path, changes: dict[str, Any], skipped: int, scale: str, notice: Notice
) -> None:
    config = run_config(tmp_path, **OVERFLOWING, **{"train.num_steps": 9, **changes})
    with notice:
        endings = pool.run(ranks.run, Layout(), config)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"{skipped} updates in a row were skipped" in ending.message
        assert f"has fallen to {scale} " in ending.message
    assert len(records(tmp_path)) == skipped - 1


MOMENT = "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"
"""Name of a moment whose last element is of a padding row, which no token reads: the loss never shows it."""

NORM = "decoder.final_layernorm.weight"
WAITS = {"checkpoint.async_save": False}
EXPERTS = {
    "model.experts": {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 16,
        "score": "sigmoid",
        "expert_bias": True,
        "bias_update_rate": 1e-3,
    }
}
ROUTER_BIAS = "decoder.layers.mlp.router.expert_bias"


def whole(run: Path) -> list[int]:
    """Returns the steps of the checkpoints that are there, every byte of them read."""
    steps = published_steps(run / "checkpoints")
    for step in steps:
        entry = load_entry(run / "checkpoints" / step_name(step))
        verify_files(entry, entry.manifest.files)
    return steps


def goes_on(pool: Pool, layout: Layout, config: Config) -> None:
    """Runs the same command, without the fault, to its end."""
    for ending in pool.run(ranks.run, layout, config):
        assert (ending.exit_code, ending.message) == (0, "")
    assert whole(Path(config.run.dir))[-1] == config.train.num_steps


@pytest.mark.parametrize(
    ("layout", "changes", "fault", "named"),
    [
        (Layout(dp=2), {}, f"step=4 phase={MOMENT}:-1", f"{MOMENT}[57, 31] is nan on rank 1"),
        # a weight that becomes NaN is found in test_bad_steps.py as well, and a moment in the first row
        pytest.param(
            Layout(tp=2),
            {"train.precision": "bf16"},
            "step=4 phase=decoder.layers.mlp.linear_fc2.weight:-1",
            "",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Layout(pp=2),
            WAITS,
            f"step=3 phase=optimizer.state.exp_avg.{NORM}:0",
            f"{NORM}[0] is nan on rank 1, one of 3",
            marks=pytest.mark.nightly,
        ),
        (Layout(dp=2, ep=2), WAITS | EXPERTS, f"step=4 phase={ROUTER_BIAS}:0", f"{ROUTER_BIAS}["),
    ],
    ids=["unused moment-dp2", "weight-tp2", "moment one step before-pp2", "bias of a router-ep2"],
)
@pytest.mark.fault(
    "numbers",
    "one weight or moment becomes NaN, seen by a loss or by none",
    happens="not saved; tensor, rank and the step to go back to are named; the good checkpoint stays (keep_last=1)",
    exit_code=4,
)
def test_a_state_that_is_not_finite_is_never_published(
    pool: Pool, tmp_path: Path, layout: Layout, changes: dict[str, Any], fault: str, named: str, notice: Notice
) -> None:
    """A NaN that reaches the loss may be found there before a background writer has looked at it."""
    config = run_config(tmp_path, **{"checkpoint.keep_last": 1, **changes})
    with notice:
        endings = pool.run(ranks.run, layout, config, f"nan rank=1 {fault}")
    back = tmp_path / "checkpoints" / step_name(2)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"go back to step 2: the next start resumes from {back}" in ending.message
        assert f"step 4: {named}" in ending.message or not named
    assert whole(tmp_path) == [2]
    if "model.experts" not in changes:  # one row shows it
        goes_on(pool, layout, config)
        assert whole(tmp_path) == [5]


@pytest.mark.parametrize(  # on one rank, which has nobody to agree with
    "is_async", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["during training", "waiting"]
)
@pytest.mark.fault(
    "numbers",
    "finite weights that no step can follow are saved",
    happens="the next loss is not finite; the checkpoint before stays (keep_last=1); the message says how to go back",
    exit_code=4,
)
def test_a_checkpoint_that_no_finite_loss_follows_does_not_cost_the_one_before(
    pool: Pool, tmp_path: Path, is_async: bool, notice: Notice
) -> None:
    """A background save has not been published when the loss is known, and never is."""
    layout = Layout(pp=2) if is_async else Layout()  # all ranks have to agree that it is never published
    config = run_config(tmp_path, **{"checkpoint.keep_last": 1, "checkpoint.async_save": is_async})
    with notice:
        endings = pool.run(ranks.run, layout, config, f"huge rank={layout.world_size - 1} step=4 phase={NORM}:0")
    doubtful = tmp_path / "checkpoints" / step_name(4)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert "step 5: the loss of term 'main' is" in ending.message
        assert "go back to step 2" in ending.message
        assert (f"move {doubtful} away" in ending.message) != is_async
    assert whole(tmp_path) == ([2] if is_async else [2, 4])
    if not is_async:
        again = pool.run(ranks.run, layout, config)
        assert "go back to step 2" in again[0].message, "a start that resumes from it does not trust it either"
        doubtful.rename(tmp_path / "bad")
    goes_on(pool, layout, config)
    assert whole(tmp_path) == [5]


@pytest.mark.parametrize(  # a save in the last step is judged like one after it
    "at_end", [pytest.param(True, marks=pytest.mark.nightly), False]
)
@pytest.mark.fault(
    "numbers",
    "the last update destroys the weights (optimizer.lr=1e30, train.num_steps=1)",
    happens="a forward pass before the last save finds it; nothing is saved",
    exit_code=4,
)
def test_the_last_update_is_judged_before_it_is_saved(pool: Pool, tmp_path: Path, at_end: bool, notice: Notice) -> None:
    saves = {"checkpoint.at_end": at_end, "checkpoint.interval_steps": 1}
    config = run_config(tmp_path, **{"optimizer.lr": 1e30, "train.num_steps": 1, **saves})
    with notice:
        endings = pool.run(ranks.run, Layout(tp=2), config)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert "the weights after step 1, the last one: the loss of term 'main' is nan" in ending.message
        assert ending.message.endswith("no good checkpoint is left to go back to")
    assert whole(tmp_path) == []


@pytest.mark.nightly  # which checkpoints stay: tests/checkpoint/store/test_retention.py
def test_stops_before_anything_is_confirmed_leave_one_checkpoint_more_and_no_pile(pool: Pool, tmp_path: Path) -> None:
    """What a stop saves is confirmed, and older ones go, in the first step of the next start."""
    config = run_config(tmp_path, **{"checkpoint.keep_last": 1, "checkpoint.interval_steps": 0})
    for start in range(3):
        (ending,) = pool.run(ranks.run, Layout(), config, f"usr1 rank=0 step={start + 1} phase=data")
        assert ending.exit_code == 0
        assert whole(tmp_path) == ([start, start + 1] if start else [1])


@pytest.mark.fault(
    "checkpoints",
    "a checkpoint that another program or version has saved with NaN in it",
    happens="passed over for the one before, loudly; it is kept aside",
    exit_code=None,
)
def test_a_saved_nan_is_not_resumed_from(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    config = run_config(tmp_path)
    (first,) = pool.run(ranks.run, Layout(), run_config(tmp_path, **{"train.num_steps": 2}))
    assert first.exit_code == 0
    pool.run(ranks.publish_unchecked, Layout(), config, 3)
    assert whole(tmp_path) == [2, 3]
    with notice:
        (ending,) = pool.run(ranks.run, Layout(), config)
    assert (ending.exit_code, ending.message) == (0, "")
    assert f"warning: the checkpoint of step 3 is skipped: {NORM}[0] is nan" in ending.output
    assert f"loading {tmp_path / 'checkpoints' / step_name(2)}" in ending.output
    assert len(list((tmp_path / "checkpoints").glob(".damaged-step_00000003-*"))) == 1
    assert whole(tmp_path) == [4, 5]


@pytest.mark.fault(
    "checkpoints",
    "NaN in the weights that a run is to start from",
    happens="refused before the first step, with the tensor's name",
    exit_code=3,
)
def test_a_run_does_not_start_from_nan(pool: Pool, tmp_path: Path, notice: Notice) -> None:
    source = tmp_path / "source"
    pool.run(ranks.publish_unchecked, Layout(), run_config(source), 1)
    config = run_config(tmp_path / "run", **{"checkpoint.initialize_from": str(source)})
    with notice:
        endings = pool.run(ranks.run, Layout(tp=2), config)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert (
            "step_00000001 cannot be trained from: decoder.final_layernorm.weight[0] is nan on rank" in ending.message
        )
    for ending in pool.run(ranks.run, Layout(tp=2), run_config(source)):
        assert ending.exit_code == 3, "nor does one go on from it where there is nothing else"
        assert "no usable checkpoint" in ending.message
