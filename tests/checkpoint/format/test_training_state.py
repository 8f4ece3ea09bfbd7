"""training_state.json is read back unchanged, and invalid content is refused."""

import json
import os
from pathlib import Path

import pytest

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.manifest import STATE_NAME, TrainingState, read_state, write_state
from mtrain.core.state.loss_scaler import LossScaler
from tests.fault_table import Notice
from tests.messages import refuses

SCALER = {"scale": 65536.0, "growth_tracker": 7, "hysteresis_tracker": 2}
STATE = TrainingState(
    step=20,
    consumed_samples=80,
    adam_step=18,
    loss_scaler=LossScaler.model_validate(SCALER),
    layout="tp1-pp1-cp1-dp1",
    device="cpu",
    vocab_size=57,
)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    assert read_state(tmp_path) == STATE


@pytest.mark.fault(
    "checkpoints",
    "counters in training_state.json that no run has (adam_step of 10^30, an infinite loss scale)",
    happens="refused with the reason",
    exit_code=3,
)
@pytest.mark.parametrize(
    "change",
    [
        {"adam_step": 10**30},
        {"adam_step": 21},
        {"adam_step": -1},
        {"step": 10**30, "adam_step": 10**30},
        {"step": 2**63, "adam_step": 1},
        {"step": "20.5"},
        {"vocab_size": 0},
        {"loss_scaler": {**SCALER, "scale": float("inf")}},
        {"loss_scaler": {**SCALER, "scale": float("nan")}},
        {"loss_scaler": {**SCALER, "growth_tracker": 10**30}},
        {"loss_scaler": {**SCALER, "hysteresis_tracker": -(10**30)}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_counters_that_no_run_has_are_refused(tmp_path: Path, change: dict[str, object], notice: Notice) -> None:
    (tmp_path / STATE_NAME).write_text(json.dumps({**STATE.model_dump(), **change}))
    with notice, refuses(DataError, "training_state.json") as error:
        read_state(tmp_path)
    assert error.value.exit_code == notice.exit_code


@pytest.mark.parametrize("kind", ["nothing", "pipe", "folder", "40 GiB", "deep"])
def test_what_is_no_state_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / STATE_NAME
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "40 GiB":
            path.touch()
            os.truncate(path, 40 * 2**30)
        case "deep":
            path.write_bytes(b"[" * 10**6)
    with refuses(DataError, "training_state.json"):
        read_state(tmp_path)
