"""The watchdog's own work, without ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtrain.watch import watchdog


def test_a_folder_that_another_watchdog_deletes_meanwhile_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, gone, old = (tmp_path / f"mtrain-{os.getuid()}-{name}" for name in ("own", "gone", "old"))
    for folder in (own, gone, old):
        folder.mkdir()
        os.utime(folder, (0, 0))
    glob = Path.glob

    def deleted_meanwhile(self: Path, pattern: str) -> Iterator[Path]:
        if self == gone:
            shutil.rmtree(gone)
            raise FileNotFoundError(str(gone))
        yield from glob(self, pattern)

    replaced: Any = deleted_meanwhile
    monkeypatch.setattr(Path, "glob", replaced)
    watchdog._sweep(own)
    assert own.exists()
    assert not old.exists()
