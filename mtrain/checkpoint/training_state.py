"""training_state.json: the counters of a run at a checkpoint, beside the tensors."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtrain.errors import DataError

STATE_NAME = "training_state.json"


class LossScaler(BaseModel):
    """The dynamic loss scale of fp16."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(gt=0)
    growth_tracker: int = Field(ge=0)
    """Updates since the last change without an overflow."""
    hysteresis_tracker: int
    """Overflows left before the scale goes down."""


class TrainingState(BaseModel):
    """What a checkpoint holds beside tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0)
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


def write_state(folder: Path, state: TrainingState) -> None:
    """Writes the state into a checkpoint's folder; OSError as the disk gives it."""
    (folder / STATE_NAME).write_text(state.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainingState:
    """Reads the state of a checkpoint.

    Raises:
        DataError: It is missing or cannot be understood.
    """
    path = folder / STATE_NAME
    try:
        return TrainingState.model_validate_json(path.read_bytes())
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except ValidationError as fault:
        raise DataError(f"{path} cannot be understood: {fault.errors()[0]['msg']}") from fault
