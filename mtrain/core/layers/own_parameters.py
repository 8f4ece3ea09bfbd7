"""Places in a checkpoint of the parameters of our own modules that are divided over TP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

ShardedOffsets = tuple[tuple[int, int, int], ...]
"""(axis, index, count) of the axes before those of the parameters, such as layers; megatron-core's form."""


def own_places(
    module: nn.Module,
    divided_axes: Mapping[str, int],
    tp: dist.ProcessGroup,
    prefix: str,
    offsets: ShardedOffsets,
    metadata: Mapping[str, Any] | None,
) -> dict[str, ShardedTensor]:
    """Returns the places of a module's own parameters, without those of submodules.

    Args:
        divided_axes: Name -> axis that is divided over TP; the others are the same on all ranks.
        metadata: Metadata that `sharded_state_dict` receives; names the group of replicas.
    """
    assert metadata is not None, "megatron-core passes it to every layer"
    return make_sharded_tensors_for_checkpoint(
        dict(module.named_parameters(recurse=False)),
        prefix,
        divided_axes,
        offsets,
        tp_group=tp,
        dp_cp_group=metadata["dp_cp_group"],
    )
