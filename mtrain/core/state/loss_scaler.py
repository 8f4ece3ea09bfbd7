"""The state of the dynamic loss scale of fp16."""

from pydantic import BaseModel, ConfigDict, Field

_MOST_COUNT = 1 << 53
"""Largest count: more steps than there will be, and still exact in torch."""


class LossScaler(BaseModel):
    """Dynamic loss scale of fp16."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(gt=0, allow_inf_nan=False)
    growth_tracker: int = Field(ge=0, le=_MOST_COUNT)
    """Number of updates since the last change, without an overflow."""
    # megatron-core counts below 0 while overflows continue (grad_scaler.py), so a negative number is no damage
    hysteresis_tracker: int = Field(ge=-_MOST_COUNT, le=_MOST_COUNT)
    """Number of overflows left before the scale goes down."""
