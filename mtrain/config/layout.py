"""`layout.*`: how ranks share the work. The layout does not change the run."""

from typing import Literal

from pydantic import Field

from mtrain.config.section import Section


class LayoutSection(Section):
    """Degrees of parallelism; dp follows from the world size."""

    tp: int = Field(1, gt=0)
    sp: bool = False
    """Sequence parallelism: norms and dropout of a TP group work on 1/tp of the sequence each."""
    pp: int = Field(1, gt=0)
    vpp: int = Field(1, gt=0)
    """Virtual pipeline stages a rank; above 1 the interleaved schedule runs."""
    cp: int = Field(1, gt=0)
    cp_comm: Literal["allgather", "ulysses"] = "allgather"
    """How context-parallel attention sees the other ranks' tokens: all-gather of keys and values, or all-to-all from
    sequence to heads."""
    ep: int = Field(1, gt=0)
    etp: int = Field(1, gt=0)
    first_stage_layers: int | None = Field(None, gt=0)
    """Layers of the first pipeline stage where stages are uneven."""
    last_stage_layers: int | None = Field(None, gt=0)
    stage_layers: tuple[int, ...] | None = None
    """Layers of every (virtual) stage in model order: pp x vpp numbers that add up to model.num_layers."""
