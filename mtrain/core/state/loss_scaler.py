"""The state of the dynamic fp16 loss scale."""

from pydantic import BaseModel, ConfigDict, Field

_MOST_COUNT = 1 << 53
"""Largest count: more steps than any run has, and still exact in torch."""


class LossScaler(BaseModel):
    """State of the dynamic fp16 loss scale."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float = Field(gt=0, allow_inf_nan=False)
    growth_tracker: int = Field(ge=0, le=_MOST_COUNT)
    """Number of updates without an overflow since the last change."""
    # megatron-core counts below 0 while overflows continue (grad_scaler.py), so negative numbers are valid
    hysteresis_tracker: int = Field(ge=-_MOST_COUNT, le=_MOST_COUNT)
    """Number of further overflows until the scale is lowered."""
