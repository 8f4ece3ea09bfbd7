"""Ranks that stop or hang: the others notice after the timeout, to the second, and name rank, phase and step."""

from pathlib import Path

import pytest

from mtrain.arch.layout import Layout
from mtrain.base.errors import RankLostError
from mtrain.base.fault_points import InjectedFault
from mtrain.base.heartbeat import Beat, Phase, verdict
from mtrain.config import Config
from tests.config.samples import config
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import lost_ranks

TIMEOUT_S = 3


def small(folder: Path) -> Config:
    """Configures three steps, with a validation and a save in the step that fails."""
    return config(
        run__dir=str(folder),
        model__num_layers=1,
        train__precision="fp32",
        train__num_steps=3,
        train__process_group_timeout_s=TIMEOUT_S,
        valid__interval_steps=2,
        valid__max_samples=2,
        checkpoint__interval_steps=2,
        checkpoint__async_save=False,
        metrics__tensorboard=False,
    )


@pytest.mark.parametrize(
    ("kind", "phase", "words"),
    [
        pytest.param(
            kind,
            phase,
            words,
            marks=pytest.mark.fault(
                "ranks",
                f"{fault} in {phase}",
                happens="the others name rank, phase and step after `train.process_group_timeout_s` (here 3 s)",
                exit_code=5,
            ),
            id=f"{kind}-{phase}",
        )
        for kind, fault, phase, words in [
            ("stop", "SIGSTOP of a rank", Phase.FORWARD_BACKWARD, "silent for"),
            ("stop", "SIGSTOP of a rank", Phase.VALIDATION, "silent for"),
            ("stop", "SIGSTOP of a rank", Phase.SAVE, "silent for"),
            ("hang", "a rank that waits for ever", Phase.DATA, "behind the others, in"),
        ]
    ],
)
@pytest.mark.waits
def test_the_others_name_a_rank_that_does_not_answer(
    pool: Pool, tmp_path: Path, kind: str, phase: Phase, words: str, notice: Notice
) -> None:
    fault = InjectedFault(kind, rank=1, step=2, phase=phase)
    with notice, pytest.raises(RankLostError) as caught:
        pool.run(lost_ranks.train_with_fault, Layout(dp=2), small(tmp_path / "run"), fault)
    assert caught.value.exit_code == notice.exit_code
    message = str(caught.value)
    assert "rank 0 lost the connection to another rank; rank 1: " + words in message
    assert f"in {phase} of step 2" in message


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2),
        Layout(dp=2, cp=2, ep=2),
        pytest.param(Layout(tp=2, pp=2, dp=2), marks=pytest.mark.nightly),  # the day has each of its groups
    ],
    ids=str,
)
@pytest.mark.parametrize("by_awake_clock", [False, True], ids=["gloo's clock", "awake clock"])
@pytest.mark.waits
def test_every_group_waits_for_exactly_the_timeout(
    pool: Pool, layout: Layout, by_awake_clock: bool, tmp_path: Path
) -> None:
    """A program's own world uses gloo's clock; ours uses one that stops while the job is suspended."""
    waited = pool.run(lost_ranks.wait_in_vain, layout, str(tmp_path / "store"), TIMEOUT_S, by_awake_clock)[0]
    names = {each.group for each in waited}
    assert len(names) > 5
    assert ("HOSTS_OF_TENSOR_PARALLEL" in names) == (layout.tp > 1)
    assert {each.call for each in waited} == {"receive", "all-reduce"}
    assert len(waited) % 2 == 0
    # libraries have timeouts of ten minutes and more; a busy machine notices later
    assert all(TIMEOUT_S - 0.1 < each.seconds < 300 for each in waited), waited


def beat(rank: int, step: int, phase: Phase, left_with: str | None = None) -> Beat:
    return Beat(rank, 1, step, phase, 0.0, 0.0, left_with)


def test_the_verdict_prefers_silence_then_errors_then_progress() -> None:
    ahead, behind = beat(0, 4, Phase.FORWARD_BACKWARD), beat(2, 4, Phase.DATA)
    left = beat(1, 4, Phase.SAVE, left_with="MachineError")
    follower = beat(3, 4, Phase.FORWARD_BACKWARD, left_with="RankLostError")
    assert verdict([behind], [ahead, behind, left, follower]).startswith("rank 2: silent for ")
    assert verdict([], [ahead, behind, left, follower]) == "rank 1: left with MachineError, in save of step 4"
    assert verdict([], [ahead, behind, follower]).startswith("rank 2: behind the others, in data of step 4 for ")
    assert verdict([], [ahead, follower]) == ""
    assert verdict([], [beat(0, 5, Phase.DATA), beat(1, 4, Phase.SAVE)]).startswith("rank 1: behind")
    many = verdict([beat(rank, 1, Phase.DATA) for rank in range(20)], [])
    assert "rank 7: silent" in many
    assert many.endswith("; 12 more ranks")
