"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of knobs; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
