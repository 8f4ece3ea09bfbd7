"""Dtypes of what ranks add up in a training step; the rank side of test_reduced_dtypes.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mtrain.config import Config
from mtrain.core.ranks.cpu_collectives import emulated_collective
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import build, own_microbatches

_ADDING = ("allreduce", "_reduce_scatter", "reduce_scatter", "reduce", "send")
"""Beginnings of torch's names of what adds up; ranks on CPUs send each other short vectors, and add them themselves."""


class Reduced(NamedTuple):
    """Something that is added up over ranks."""

    kind: str
    dtype: str
    ndim: int
    """Number of dimensions: activations and their gradients have three or more."""
    ranks: int
    """Number of ranks in the group."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[Reduced] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = function.name().split(".")[0].split("::")
        # halves that two ranks swap are those of activations, flattened
        if namespace == "c10d" and name.startswith(_ADDING) and emulated_collective() is None:
            group = dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))
            tensors = [each for each in tree_flatten(args)[0] if isinstance(each, Tensor)]
            self.found |= {Reduced(name, str(each.dtype), each.ndim, group.size()) for each in tensors}
        return function(*args, **(kwargs or {}))


def reduced(groups: Groups, config: Config, batch: GlobalBatch) -> set[Reduced]:
    """Returns what one step adds up over ranks."""
    built = build(groups, config)
    recording = _Recording()
    with recording:
        totals = built.training.forward_backward(own_microbatches(batch, groups, config))
        built.training.update(totals, config.optimizer.lr)
    return recording.found
