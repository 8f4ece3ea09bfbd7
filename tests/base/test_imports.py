"""What is imported at a start is not looked through by the garbage collector."""

import gc
import sys
from pathlib import Path

import pytest

from mtrain.base.imports import without_collections


def test_no_collection_runs_while_a_block_imports_and_the_next_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heavy_module.py").write_text("kept = [[] for _ in range(100_000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    frozen, collected = gc.get_freeze_count(), [each["collections"] for each in gc.get_stats()]
    try:
        with without_collections():
            import heavy_module  # type: ignore[import-not-found]

        assert [each["collections"] for each in gc.get_stats()] == collected
        assert gc.isenabled()
        assert gc.get_freeze_count() - frozen >= len(heavy_module.kept)
    finally:
        gc.unfreeze()


def test_a_failing_import_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), without_collections():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()
