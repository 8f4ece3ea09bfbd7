"""training_state.json: the counters of a run at a checkpoint, beside the tensors."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file

STATE_NAME = "training_state.json"
_MOST_BYTES = 1 << 20
_MOST_COUNT = 1 << 53
"""More steps or samples than there will be, and what torch still counts."""


class LossScaler(BaseModel):
    """The dynamic loss scale of fp16."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(gt=0, allow_inf_nan=False)
    growth_tracker: int = Field(ge=0, le=_MOST_COUNT)
    """Updates since the last change without an overflow."""
    # megatron-core goes on counting below 0 while overflows go on (grad_scaler.py), so a negative one is no damage
    hysteresis_tracker: int = Field(ge=-_MOST_COUNT, le=_MOST_COUNT)
    """Overflows left before the scale goes down."""


class RecentUpdates(BaseModel):
    """The latest updates, by which train.on_spike judges the next step; the oldest first."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()


class TrainingState(BaseModel):
    """What a checkpoint holds beside tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0, le=_MOST_COUNT)
    """Optimizer updates completed, by the run's count."""
    consumed_samples: int = Field(ge=0)
    adam_step: int = Field(ge=0)
    """Updates that changed the weights: an overflow of fp16 or an empty batch changes nothing."""
    loss_scaler: LossScaler | None
    """fp16 only."""
    layout: str
    device: str
    """cpu or cuda: random states of one mean nothing to the other."""
    vocab_size: int = Field(gt=0)
    """Rows of the embedding that are tokens; the rest is padding and follows the layout."""
    recent: RecentUpdates | None = None
    """Where train.on_spike is set."""


def write_state(folder: Path, state: TrainingState) -> None:
    """Writes the state into a checkpoint's folder; OSError as the disk gives it."""
    # in place: the folder is published as a whole, and the manifest has the digest of this file
    # left out where there is none: versions that do not know the key read the rest
    absent = {"recent"} if state.recent is None else set[str]()
    (folder / STATE_NAME).write_text(state.model_dump_json(indent=1, exclude=absent) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    """Reads the state of a checkpoint.

    Raises:
        DataError: It is missing or cannot be understood.
    """
    path = folder / STATE_NAME
    try:
        state = TrainingState.model_validate_json(read_plain_file(path, _MOST_BYTES))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValidationError as fault:
        # cut: pydantic repeats what it was given, which in a damaged file is anything
        raise DataError(f"{path} cannot be understood: {fault.errors()[0]['msg'][:500]}") from fault
    # each value is valid alone; together they would give Adam a bias correction that no run had
    if state.adam_step > state.step:
        raise DataError(
            f"{path} cannot be understood: adam_step={state.adam_step}, but only {state.step} steps were made"
        )
    return state
