"""training_state.json: the counters of a run at a checkpoint, next to the tensors."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file
from mtrain.core.state.loss_scaler import LossScaler

STATE_NAME = "training_state.json"
_MOST_BYTES = 1 << 20
_MOST_COUNT = 1 << 53
"""Largest count: more steps or samples than there will be, and still exact in torch."""


class RecentUpdates(BaseModel):
    """Latest updates, by which train.on_spike judges the next step; the oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()


class TrainingState(BaseModel):
    """State of a run in a checkpoint besides its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed, as the run counts them."""
    consumed_samples: int = Field(ge=0)
    adam_step: int = Field(ge=0)
    """Number of updates that changed the weights: after an overflow of fp16 or an empty batch it stays."""
    loss_scaler: LossScaler | None
    """Loss scaler of an fp16 run; else None."""
    layout: str
    device: str
    """Kind of device, cpu or cuda: random states of one are meaningless to the other."""
    vocab_size: int = Field(gt=0)
    """Number of embedding rows that are tokens; the others are padding, which depends on the layout."""
    recent: RecentUpdates | None = None
    """Latest updates where train.on_spike is set; else None."""


def write_state(folder: Path, state: TrainingState) -> None:
    """Writes the state into a checkpoint's folder; raises OSError where the disk refuses."""
    # in place: the folder is published as a whole, and the manifest has the digest of this file
    # left out where it is None: versions that do not know the key can read the rest
    absent = {"recent"} if state.recent is None else set[str]()
    (folder / STATE_NAME).write_text(state.model_dump_json(indent=1, exclude=absent) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    """Reads the state of a checkpoint.

    Raises:
        DataError: The file is missing or cannot be understood.
    """
    path = folder / STATE_NAME
    try:
        state = TrainingState.model_validate_json(read_plain_file(path, _MOST_BYTES))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValidationError as fault:
        # cut: pydantic repeats its input, which can be anything in a damaged file
        raise DataError(f"{path} cannot be understood: {fault.errors()[0]['msg'][:500]}") from fault
    # each value is valid alone, but together they would give Adam a bias correction that no run had
    if state.adam_step > state.step:
        raise DataError(
            f"{path} cannot be understood: adam_step={state.adam_step}, but only {state.step} steps were made"
        )
    return state
