"""Where a checkpoint keeps the parameters of a module of ours that is divided over TP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

ShardedOffsets = tuple[tuple[int, int, int], ...]
"""(axis, index, count) of the axes that stand before those of the parameters, such as layers; megatron-core's form."""


def own_places(
    module: nn.Module,
    divided_axes: Mapping[str, int],
    tp: dist.ProcessGroup,
    prefix: str,
    offsets: ShardedOffsets,
    metadata: Mapping[str, Any] | None,
) -> dict[str, ShardedTensor]:
    """What `sharded_state_dict` of a module without submodules gives.

    Args:
        module: Whose parameters they are.
        divided_axes: Name -> the axis that is divided over TP; the others are the same on all ranks.
        tp: The ranks that share them.
        prefix: Of the keys.
        offsets: As `sharded_state_dict` receives them.
        metadata: As well; names the group of replicas.
    """
    assert metadata is not None, "megatron-core passes it to every layer"
    places: dict[str, ShardedTensor] = make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        divided_axes,
        offsets,
        tp_group=tp,
        dp_cp_group=metadata["dp_cp_group"],
    )
    return places
