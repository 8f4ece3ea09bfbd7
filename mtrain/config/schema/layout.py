"""`layout.*`: division of the work over ranks. The layout does not change the run."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from mtrain.config.schema.section import Section

CpComm = Literal["allgather", "ulysses", "ring"]
"""How context-parallel ranks bring queries and keys together."""
Shard = Literal["optimizer", "weights"]
"""What data-parallel ranks divide."""
_SPLITS = ("first_stage_layers", "last_stage_layers", "stage_layers")


class LayoutSection(Section):
    """Degrees of parallelism; dp follows from the world size."""

    tp: int = Field(1, gt=0)
    """Tensor parallelism: ranks that divide each matrix."""
    sp: bool = False
    """Sequence parallelism: whether each rank of a TP group computes norms and dropout on 1/tp of the sequence."""
    pp: int = Field(1, gt=0)
    """Pipeline parallelism: ranks that divide the layers."""
    vpp: int = Field(1, gt=0)
    """Virtual pipeline stages per rank; above 1, the schedule is interleaved."""
    cp: int = Field(1, gt=0)
    """Context parallelism: ranks that divide the positions of each row."""
    cp_comm: CpComm = "allgather"
    """How context-parallel attention sees the other ranks' tokens: all-gather of keys and values, all-to-all from
    sequence to heads, or keys and values that travel around a ring while each rank attends to those it has."""
    shard: Shard = "optimizer"
    """What the ranks of DP x CP divide. optimizer: float32 main weights and moments, with train.distributed_optimizer.
    weights: weights and gradients as well, which are gathered layer by layer (ZeRO-3, fully sharded data parallel)."""
    ep: int = Field(1, gt=0)
    """Expert parallelism: ranks, out of tp x cp x dp, that divide the experts of a layer."""
    etp: int = Field(1, gt=0)
    """Tensor parallelism inside each expert: ranks that divide it, independent of tp."""
    first_stage_layers: int | None = Field(None, gt=0)
    """Layers in the first (virtual) stage of an uneven split, while the others share the rest evenly; null: like the
    others."""
    last_stage_layers: int | None = Field(None, gt=0)
    """Layers in the last (virtual) stage; null: like the others."""
    stage_layers: tuple[int, ...] | None = None
    """Layers in every (virtual) stage in model order: pp x vpp numbers that add up to model.num_layers; null: even."""

    def broken_rules(self) -> Iterator[str]:
        if self.sp and self.tp == 1:
            yield "sp=true needs tp > 1, but tp=1; raise tp or turn sp off"
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp={self.vpp} needs pp > 1, but pp=1; raise pp or set vpp to 1"
        splits = [name for name in _SPLITS if getattr(self, name) is not None]
        if splits and self.pp == 1:
            yield f"{splits[0]} divides the layers over pipeline stages, but pp=1; raise pp or remove it"
        if self.stage_layers is None:
            return
        if len(splits) > 1:
            yield (
                "stage_layers names the layers of every stage, but first_stage_layers or last_stage_layers is also "
                "given; keep one of the two ways"
            )
        stages = self.pp * self.vpp
        if len(self.stage_layers) != stages or min(self.stage_layers) <= 0:
            yield (
                f"stage_layers={list(self.stage_layers)} needs {stages} numbers above 0, one per stage of "
                f"pp={self.pp} x vpp={self.vpp}; fix the list"
            )
