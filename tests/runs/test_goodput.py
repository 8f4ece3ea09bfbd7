"""Goodput, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrain.runs.goodput import (
    RunStart,
    StartAccount,
    goodput_of,
    goodput_of_run,
    new_number,
    read_starts,
    start_file,
    write_start,
)

FIRST = RunStart(
    number=1,
    began_s=1000.0,
    written_s=1200.0,
    host="a",
    job="7-0",
    world_size=4,
    start_step=0,
    step=30,
    trained_s=150.0,
    phases_s={"start": 10.0, "build": 15.0, "save": 5.0, "validation": 3.0, "forward_backward": 140.0},
    saves=((10, 40.0), (20, 95.0)),
)
SECOND = RunStart(
    number=2,
    began_s=1300.0,
    written_s=1400.0,
    host="b",
    job="7-1",
    world_size=2,
    start_step=20,
    step=35,
    trained_s=80.0,
    phases_s={"start": 8.0, "save": 2.0},
    ended="done",
)


def test_time_and_steps_of_two_starts() -> None:
    goodput = goodput_of([FIRST, SECOND])
    assert goodput is not None
    assert (goodput.lost_steps, goodput.restarts) == (10, 1)
    assert goodput.lost_s == pytest.approx(150 - 95), "what was trained after the save of step 20"
    assert goodput.effective_s == pytest.approx(95 + 80)
    assert goodput.wall_s == pytest.approx(400)
    assert goodput.waiting_s == pytest.approx(100)
    assert goodput.start_up_s == pytest.approx(33)
    assert (goodput.saving_s, goodput.validation_s) == (7.0, 3.0)
    assert goodput.fraction == pytest.approx(175 / 400)
    parts = (goodput.effective_s, goodput.lost_s, goodput.waiting_s, goodput.start_up_s, goodput.saving_s)
    assert sum(parts) + goodput.validation_s + goodput.export_s + goodput.other_s == pytest.approx(goodput.wall_s)
    text = "\n".join(goodput.lines())
    assert "goodput 43.8%" in text
    assert "restarts 1, lost steps 10" in text


def test_a_start_that_never_trained_loses_nothing() -> None:
    dead = RunStart(2, 1210.0, 1215.0, "a", None, 4)
    third = RunStart(3, 1300.0, 1400.0, "b", "7-1", 2, start_step=20, step=35, trained_s=80.0)
    goodput = goodput_of([FIRST, dead, third])
    assert goodput is not None
    assert (goodput.lost_steps, goodput.restarts) == (10, 2)
    unknown = goodput_of([FIRST, RunStart(2, 1300.0, 1310.0, "b", None, 2)])
    assert unknown is not None
    assert unknown.lost_steps == 0, "nobody has gone on yet"


def test_without_a_note_of_the_save_time_is_lost_in_proportion() -> None:
    goodput = goodput_of([FIRST, RunStart(2, 1300.0, 1310.0, "b", None, 2, start_step=15)])
    assert goodput is not None
    assert goodput.lost_s == pytest.approx(75)


def test_steps_that_a_rollback_takes_back_are_lost(tmp_path: Path) -> None:
    """One start from step 20: to 24, where it saves, to 27, back to 24, to 26, and back to before its own start."""
    folder = tmp_path / "starts"
    account = StartAccount(folder, new_number(folder), 0, 1)
    account.goes_on(20)
    for step in range(21, 28):
        account.completed(step, 2.0)
        if step == 24:
            account.saved(step)
    account.gone_back(24)
    account.write()
    first = goodput_of_run(tmp_path)
    assert first is not None
    assert (first.lost_steps, first.lost_s, first.effective_s) == (3, 6.0, 8.0)
    for step in (25, 26):
        account.completed(step, 1.0)
    account.gone_back(18)
    account.write()
    (start,) = read_starts(folder)
    assert (start.start_step, start.step, start.trained_s) == (18, 18, 0.0)
    assert (start.lost_steps, start.lost_s) == (3 + 6, 6.0 + 10.0)
    second = goodput_of([replace(FIRST, step=20), start])
    assert second is not None
    assert second.lost_steps == 9 + 2, "two of the start before"


def test_accounts_are_read_back_and_damaged_ones_left_out(tmp_path: Path) -> None:
    assert goodput_of_run(tmp_path) is None
    folder = tmp_path / "starts"
    assert [new_number(folder) for _ in range(3)] == [1, 2, 3]
    for start in (FIRST, SECOND):
        write_start(folder, start)
    assert read_starts(folder) == [FIRST, SECOND], "the third has not written yet"
    start_file(folder, 1).write_text('{"number": 1')
    assert read_starts(folder) == [SECOND]
    assert new_number(folder) == 4
