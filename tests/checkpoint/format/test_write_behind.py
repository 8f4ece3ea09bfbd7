"""The disk is asked to begin while a file is still written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mtrain.checkpoint.format.write_behind import WriteBehind

MANY = 1 << 26


def test_the_disk_is_asked_after_many_bytes_and_never_twice_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer goes on meanwhile."""
    asked, may_end = list[int](), threading.Event()

    def slow(descriptor: int) -> None:
        asked.append(descriptor)
        assert may_end.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    with (tmp_path / "file").open("wb") as file, WriteBehind(file.fileno()) as behind:
        behind.note(MANY - 1)
        behind.wait()
        assert not asked
        for _ in range(5):
            behind.note(MANY)
        may_end.set()
        behind.wait()
        assert asked == [file.fileno()]
        behind.note(1)  # covers what was written while the first was under way
        behind.wait()
        assert asked == [file.fileno()] * 2


def test_what_the_disk_refuses_is_raised_to_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with (
        (tmp_path / "file").open("wb") as file,
        # at the end of the block: an fsync of a file that is opened later would not hear of it
        pytest.raises(OSError, match="No space left"),
        WriteBehind(file.fileno()) as behind,
    ):
        behind.note(MANY)
