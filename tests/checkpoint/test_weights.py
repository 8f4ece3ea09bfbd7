"""Weights of a checkpoint as numpy arrays."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.directory import delete_checkpoint
from mtrain.checkpoint.weights import read_weights
from tests.messages import refuses
from tests.paths import ROOT

ARCHIVE = ROOT / "tests" / "compatibility" / "runs_of_0.1.0.tar.xz"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Creates a run folder with one checkpoint, of step 4."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "dense"


def test_another_run_deletes_nothing_that_can_still_be_read(run: Path) -> None:
    weights = read_weights(run)
    assert not delete_checkpoint(run / "checkpoints", 4)
    assert all(np.isfinite(values).all() for values in weights.values())
    del weights
    assert delete_checkpoint(run / "checkpoints", 4)


def test_what_cannot_be_read_is_not_held(run: Path) -> None:
    file = run / "checkpoints" / "step_00000004" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with refuses(DataError, "__0_0.distcp"):
        read_weights(run)
    assert delete_checkpoint(run / "checkpoints", 4)
