"""Heartbeats say what a rank does, and never disturb it."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.base.heartbeat import Beat, Heartbeat, Phase, heartbeat_file, read_beat
from tests.fault_table import Notice


def wait_for(condition: Callable[[Beat], bool], folder: Path) -> Beat:
    deadline = time.monotonic() + 300
    while (beat := read_beat(folder, 3)) is None or not condition(beat):
        assert time.monotonic() < deadline, beat
        time.sleep(0.01)
    return beat


def test_a_beat_says_where_the_rank_is_and_how_it_left(tmp_path: Path) -> None:
    with Heartbeat(tmp_path / "new", 3, 4, timeout_s=1) as heartbeat:
        first = wait_for(lambda beat: beat.phase == Phase.START, tmp_path / "new")
        assert (first.rank, first.pid, first.step, first.left_with) == (3, os.getpid(), 0, None)
        heartbeat.enter(Phase.SAVE, 12)
        saving = wait_for(lambda beat: beat.phase == Phase.SAVE, tmp_path / "new")
        assert saving.place == "save of step 12"
        again = wait_for(lambda beat: beat.written_s > saving.written_s, tmp_path / "new")
        assert again.since_s == saving.since_s, "it beats without a change, too"
    assert wait_for(lambda beat: beat.left_with is not None, tmp_path / "new").left_with == "done"
    with pytest.raises(ZeroDivisionError), Heartbeat(tmp_path / "new", 3, 4, timeout_s=1):
        raise ZeroDivisionError
    assert wait_for(lambda beat: beat.left_with is not None, tmp_path / "new").left_with == "ZeroDivisionError"


def test_a_file_keeps_its_size(tmp_path: Path) -> None:
    """A disk that has filled up since still accepts the beat."""
    sizes = set()
    with Heartbeat(tmp_path, 3, 4, timeout_s=1) as heartbeat:
        for phase in Phase:
            heartbeat.enter(phase, 10**9)
            wait_for(lambda beat, phase=phase: beat.phase == phase, tmp_path)  # type: ignore[misc]
            sizes.add(heartbeat_file(tmp_path, 3).stat().st_size)
    assert len(sizes) == 1


@pytest.mark.fault(
    "disk", "heartbeats cannot be written", happens="training continues; they come back with the disk", exit_code=None
)
def test_a_disk_that_takes_no_beat_costs_nothing_else(tmp_path: Path, notice: Notice) -> None:
    folder = tmp_path / "heartbeats"
    folder.write_text("not a folder")
    with Heartbeat(folder, 3, 4, timeout_s=1) as heartbeat:
        with notice:
            heartbeat.enter(Phase.DATA, 1)
        time.sleep(0.5)
        folder.unlink()
        assert wait_for(lambda beat: True, folder).phase == Phase.DATA
    assert notice.exit_code is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"phase": "data"}', '{"phase": "sleep"}', '{"rank": 1}'])
def test_what_is_no_beat_is_none(tmp_path: Path, text: str) -> None:
    heartbeat_file(tmp_path, 3).write_text(text)
    assert read_beat(tmp_path, 3) is None
    assert read_beat(tmp_path, 4) is None
