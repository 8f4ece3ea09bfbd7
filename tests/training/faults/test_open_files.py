"""A process that can open no further file goes on training, and saves as soon as it can open files again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.arch.layout import Layout
from mtrain.checkpoint.store.steps import published_steps
from tests.core.state.test_save_and_load import configured
from tests.fault_table import Notice
from tests.pool import Pool
from tests.training.faults import environment_ranks as ranks
from tests.training.test_trainer import numbers


@pytest.mark.parametrize("changes", [{}, {"checkpoint.async_save": False}], ids=["during training", "waiting"])
@pytest.mark.fault(
    "disk",
    "a rank has no file descriptor left (EMFILE) for some steps",
    happens="its save fails with a warning, every step is recorded, and the next save succeeds",
    exit_code=None,
)
def test_a_rank_without_descriptors_trains_on(
    pool: Pool, tmp_path: Path, changes: dict[str, Any], notice: Notice
) -> None:
    sizes = {"model.num_layers": 1, "train.micro_batch_size": 2}
    saves = {"checkpoint.interval_steps": 3, "checkpoint.keep_last": 9, **changes}
    config = configured(**{"run.dir": str(tmp_path), **sizes, **saves})
    with notice:
        (first, other) = pool.run(ranks.without_descriptors, Layout(dp=2), config, 5, 8)
    assert (first.exit_code, first.message, other.exit_code) == (0, "", 0)
    assert "warning: no checkpoint of step 6" in first.output
    assert "Too many open files" in first.output
    saved = published_steps(tmp_path / "checkpoints")
    # on a slow machine a background save is still on its way when the descriptors run out, and fails as well
    assert saved == [3, 9] or (saved == [9] and "warning: no checkpoint of step 3" in first.output)
    assert [step for step, *_ in numbers(tmp_path)] == list(range(1, 10))
