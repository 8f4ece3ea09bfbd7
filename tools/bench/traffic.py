"""Traffic between ranks in a step: every collective with its bytes, by the group that it runs over.

Bytes are what an ideal ring or exchange makes one rank send: of an all-gather or a reduce-scatter over n ranks
(n - 1) / n of the whole, of an all-reduce twice that, of an all-to-all what goes to others. So they do not depend on
the backend, and can be compared with a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mtrain.core.ranks.cpu_collectives import emulated_collective
from mtrain.core.ranks.groups import Groups

AXES = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp_cp": "dp", "expt_dp": "dp", "embd": "pp"}
"""Attribute of megatron-core's groups -> axis that they serve."""
KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}
"""Operation of torch -> kind."""
SMALL_BYTES = 4096
"""Size in bytes below which a collective only costs its latency."""


@dataclass
class Calls:
    """Calls of one kind over one group."""

    count: int = 0
    sent_bytes: float = 0.0
    small: int = 0
    """Number of calls below SMALL_BYTES."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of collectives inside its `with` block; it changes nothing."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[tuple[str, str], Calls] = {}
        """Calls by (axis, kind); axes are tp, cp, dp, ep, pp and world."""
        self._axes: dict[str, str] = {}
        # gradients are summed over dp x cp, which is a group of its own besides cp
        for attribute, axis in AXES.items():
            group = getattr(groups.collection, attribute, None)
            if group is not None:
                self._axes.setdefault(group.group_name, axis)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, name = function.name().split(".")[0].split("::")
        if namespace == "c10d" and not name.startswith(("recv", "barrier", "monitored")):
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            self._count(name, args, dist.ProcessGroup.unbox(boxed))
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any], group: dist.ProcessGroup) -> None:
        size = group.size()
        kind = KINDS[name]  # a new one has to be named there
        sent = _sent(kind, args, size, group.rank())
        kind = emulated_collective() or kind  # two ranks swap halves: as many bytes as the collective sends
        axis = self._axes.get(group.group_name, "world")
        if kind == "send" and axis != "cp":  # stages send each other activations, also over the group of all ranks
            axis = "pp" if args[0][0].ndim > 1 else "world"
        calls = self.calls.setdefault((axis, kind), Calls())
        calls.count += 1
        calls.sent_bytes += sent
        calls.small += sent < SMALL_BYTES


def _sent(kind: str, args: Sequence[Any], size: int, rank: int) -> float:
    """Returns the bytes that one rank sends in one call."""
    match kind:
        case "all-gather" | "reduce-scatter":
            # the larger of input and output is the whole
            return max(_bytes(args[0]), _bytes(args[1])) * (size - 1) / size
        case "all-reduce":
            return 2 * _bytes(args[0]) * (size - 1) / size
        case "all-to-all":
            own, splits = _bytes(args[1]), list(args[4])
            kept = splits[rank] / sum(splits) if sum(splits) else 1 / size
            return own * (1 - kept)
        case "broadcast" | "send":
            return _bytes(args[0])
        case _:
            raise ValueError(f"{kind} has no bytes; add it to _sent")


def _bytes(given: Any) -> float:
    """Sums the sizes of a tensor or of all tensors in a list."""
    tensors = [each for each in tree_flatten(given)[0] if isinstance(each, Tensor)]
    return float(sum(each.numel() * each.element_size() for each in tensors))


def measured(groups: Groups, step: Callable[[], object]) -> dict[tuple[str, str], Calls]:
    """Counts the collectives of one call of `step` on this rank."""
    traffic = Traffic(groups)
    with traffic:
        step()
    return traffic.calls


def of_axis(calls: Mapping[tuple[str, str], Calls], axis: str) -> Calls:
    """Sums up all kinds over one group."""
    found = [each for (name, _), each in calls.items() if name == axis]
    return Calls(*(sum(getattr(each, name) for each in found) for name in ("count", "sent_bytes", "small")))
