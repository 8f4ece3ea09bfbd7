"""`run.*`, `checkpoint.*` and `metrics.*`: what a run leaves behind."""

from typing import Literal

from pydantic import Field

from mtrain.config.section import Section


class RunSection(Section):
    """The run folder."""

    dir: str
    """Holds config.yaml, metrics.jsonl, checkpoints/ and logs/."""


class CheckpointSection(Section):
    """Saving, resuming and starting from other weights."""

    interval_steps: int = Field(0, ge=0)
    """0: only at the end and on a signal."""
    at_end: bool = True
    keep_last: int = Field(2, gt=0)
    keep_every_steps: int | None = Field(None, gt=0)
    """Checkpoints at multiples of this are never deleted."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest good checkpoint of the run folder; never refuses a run folder that has one."""
    initialize_from: str | None = None
    """A checkpoint directory, or a run folder (its newest one), whose weights this run starts from; optimizer, step
    and data order start anew."""


class MetricsSection(Section):
    """Where step records go beside metrics.jsonl."""

    console_interval_steps: int = Field(1, gt=0)
    tensorboard: bool = True
