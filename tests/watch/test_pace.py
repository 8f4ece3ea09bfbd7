"""Slow ranks, found by their own time of work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.heartbeat import Beat, Phase
from mtrain.runs.events import EventKind, read_events
from mtrain.training.recording import PaceJudge, slow_ranks
from tests.fault_table import Notice
from tests.training.test_trainer import command, finished, records, start

__all__ = ["command", "start"]

SLOW = """
import os, time
from mtrain.core.loss.functions.likelihood import next_token_loss

def loss(inputs):
    if os.environ["RANK"] == "1":
        time.sleep(0.2)
    return next_token_loss(inputs)
"""


@pytest.mark.fault(
    "ranks",
    "a rank whose own work takes longer than that of the others",
    happens="console, metrics and an alarm name it, with its ratio to the median",
    exit_code=None,
)
@pytest.mark.waits
def test_a_slow_rank_is_named(command: Any, start: Any, tmp_path: Path, notice: Notice) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    watch = ["watch.window_steps=2", "watch.slow_rank_windows=2", "watch.slow_rank_percent=50"]
    options = ["loss.function=slow:loss", "train.num_steps=12", "layout.tp=2", *watch]
    with notice:
        code, output, errors = finished(start(command(*options, ranks=2)))
    assert code == 0, errors
    run = tmp_path / "run"
    assert output.count("warning: rank 1 is slow: its own work took ") == 1
    (alarm,) = (event for event in read_events(run / "events.jsonl") if event.kind is EventKind.ALARM)
    assert alarm.facts["slow_rank"] == 1
    steps = records(run)
    assert [step["slow_rank"] for step in steps[:4]] == [None] * 4, "two windows are needed"
    named = [step for step in steps if step["slow_rank"] is not None]
    assert {step["slow_rank"] for step in named} == {1}
    assert all(step["slow_rank_ratio"] > 1.5 for step in named)
    assert max(step["waited_seconds"] for step in steps) > 0.2, "the first rank waits for the other one's microbatches"
    assert all(0 <= step["waited_seconds"] < step["seconds"] for step in steps)


def window(*seconds: float, stages: tuple[int, ...] = ()) -> list[Beat]:
    beat = Beat(0, 1, 5, Phase.UPDATE, 0.0, 0.0)
    return [
        replace(beat, rank=rank, stage=stages[rank] if stages else 0, pace_s=pace_s)
        for rank, pace_s in enumerate(seconds)
    ]


def test_ranks_are_compared_with_the_median_of_their_stage() -> None:
    assert slow_ranks(window(1.0, 1.1, 1.0, 1.6), 25) == {3: pytest.approx(1.6)}
    assert slow_ranks(window(1.0, 1.2), 25) == {}
    assert slow_ranks(window(1.0, 3.0), 25) == {1: pytest.approx(3.0)}
    assert slow_ranks(window(1.0, 1.0, 5.0, 5.0, stages=(0, 0, 1, 1)), 25) == {}, "stages differ by design"
    assert slow_ranks(window(1.0, 1.0, 5.0, 9.0, stages=(0, 0, 1, 1)), 25) == {3: pytest.approx(1.8)}


def test_a_rank_is_slow_after_several_windows_in_a_row() -> None:
    judge = PaceJudge(25, 3)
    slow, even = window(1.0, 1.0, 2.0), window(1.0, 1.0, 1.0)
    assert [judge.add(each) for each in (slow, slow, even, slow, slow)] == [{}] * 5
    assert judge.add(slow) == {2: 2.0}
    assert judge.add(even) == {}
