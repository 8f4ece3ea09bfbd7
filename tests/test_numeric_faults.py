"""Numeric faults in whole runs: they end with exit code 4, and good checkpoints outlive them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrain.config import Config
from mtrain.layout import Layout
from tests import numeric_fault_ranks as ranks
from tests.fault_table import Notice
from tests.mcore.test_checkpoint import configured
from tests.pool import Pool
from tests.test_trainer import records

OVERFLOWING = {
    "train.precision": "fp16",
    "loss.function": "tests.parity.losses:times",
    "loss.options": {"factor": 1e12},
}
"""Gradients that overflow in fp16 at every loss scale."""


def run_config(run: Path, **changes: Any) -> Config:
    """A run that saves after every second step."""
    return configured(**{"run.dir": str(run), "checkpoint.interval_steps": 2, **changes})


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
    config = run_config(tmp_path, **OVERFLOWING, **changes)
    with notice:
        endings = pool.run(ranks.run, Layout(tp=2), config)
    for ending in endings:
        assert ending.exit_code == notice.exit_code
        assert f"{skipped} updates in a row were skipped" in ending.message
        assert f"has fallen to {scale} " in ending.message
    assert len(records(tmp_path)) == skipped - 1
