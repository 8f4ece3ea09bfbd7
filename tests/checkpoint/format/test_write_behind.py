"""The disk is asked to begin while a file is still written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mtrain.checkpoint.format import hashed_file
from mtrain.checkpoint.format.hashed_file import WriteBehind, begin_writing

MANY = 1 << 24


def test_the_disk_is_asked_for_every_byte_once_and_never_twice_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer continues in the meantime."""
    asked, may_end = list[tuple[int, int, int]](), threading.Event()

    def slow(*request: int) -> None:
        asked.append(request)  # type: ignore[arg-type]
        assert may_end.wait(60)

    monkeypatch.setattr(hashed_file, "begin_writing", slow)
    with (tmp_path / "file").open("wb") as file, WriteBehind(file.fileno()) as behind:
        number = file.fileno()
        behind.note(MANY - 1)
        behind.wait()
        assert not asked
        for _ in range(5):
            behind.note(MANY)
        may_end.set()
        behind.wait()
        assert asked == [(number, 0, 2 * MANY - 1)]
        behind.note(1)  # includes bytes that were written while the first call was under way
        behind.wait()
        assert asked[1:] == [(number, 2 * MANY - 1, 4 * MANY + 1)]


def test_what_the_disk_refuses_is_raised_to_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*request: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hashed_file, "begin_writing", full)
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(OSError, match="No space left"),
        WriteBehind(file.fileno()) as behind,
    ):
        behind.note(MANY)


def test_the_system_is_asked_and_its_refusal_is_raised(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"1" * 10_000)
        file.flush()
        begin_writing(file.fileno(), 0, 10_000)
        with pytest.raises(OSError, match="Bad file descriptor"):
            begin_writing(_NO_FILE, 0, 1)


def test_what_cannot_be_written_ahead_is_left_to_the_end() -> None:
    """The kernel or the file system does not know the call."""
    reading, writing = os.pipe()
    try:
        begin_writing(writing, 0, 1)
        os.write(writing, b"1")
        assert os.read(reading, 2) == b"1", "what is written later arrives, and nothing else"
    finally:
        os.close(reading)
        os.close(writing)


def test_systems_without_the_call_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        begin_writing(_NO_FILE, 0, 1)
    monkeypatch.setattr("sys.platform", "darwin")
    begin_writing(_NO_FILE, 0, 1)


_NO_FILE = -1
"""Descriptor of no file; that of a closed one may be taken by another thread in the meantime."""
