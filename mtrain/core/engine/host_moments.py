"""Adam's moments in host memory, on the device only during their update.

The device computes the update with its usual kernel, group by group: while it updates a group of parameters, the
moments of the next group arrive and those of the previous one leave. So the results do not depend on where moments are
between updates, and the host neither computes nor waits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrain.arch.memory import MOMENTS_AT_ONCE_BYTES as MOMENTS_AT_ONCE_BYTES  # tests move less
from mtrain.core.engine.optimizer_state import MOMENTS, GroupCounts, OptimizerState, give_moments
from mtrain.core.state.host_memory import CopyStream, HostBlocks

_ALIGNED_ELEMENTS = 16
"""Elements of a cache line, to which moments are aligned, so that kernels read them like separate tensors."""


class HostMoments:
    """The moments of a rank between updates; replaces the `step` of the inner optimizers."""

    def __init__(self, state: OptimizerState, device: torch.device) -> None:
        """Gives every parameter zero moments; call it before the first update and before anything is loaded."""
        self._arriving, self._leaving = CopyStream(device), CopyStream(device)
        self._groups: list[_Group] = []
        blocks = HostBlocks(device.type == "cuda", "the optimizer's moments")
        for part, mains in state.mains_by_part():
            groups = [_Group(part, group, device, blocks) for group in _grouped(mains)]
            if not groups:  # this optimizer may update nothing on this rank
                continue
            self._groups += groups
            # replaced on the instance: megatron-core calls it when gradients are ready, and then copies the main
            # weights, which stay on the device, to those of the model
            part.optimizer.step = functools.partial(self._step, part, groups, part.optimizer.step)

    @property
    def memory(self) -> list[Tensor]:
        """Returns the host memory of each group, [bytes] each."""
        return [group.memory for group in self._groups]

    def _step(self, part: Any, groups: Sequence[_Group], step: Callable[[], object]) -> None:
        counts, whole = GroupCounts(part), [group["params"] for group in part.optimizer.param_groups]
        before: _Group | None = None
        groups[0].come(self._arriving)
        for number, group in enumerate(groups):
            if number + 1 < len(groups):
                groups[number + 1].come(self._arriving)
            group.begin(self._arriving)
            counts.restore()
            step()
            group.go(self._leaving)
            if before is not None:
                before.free(self._leaving)
            before = group
        groups[-1].free(self._leaving)
        counts.advance()
        for group_of_part, parameters in zip(part.optimizer.param_groups, whole, strict=True):
            group_of_part["params"] = parameters


class _Group:
    """Parameters that are updated together, from any of torch's parameter groups, and their moments."""

    def __init__(self, part: Any, mains: Sequence[Tensor], device: torch.device, blocks: HostBlocks) -> None:
        self._mains, self._device = mains, device
        self._states = [part.optimizer.state[main] for main in mains]
        self._param_groups, main_ids = part.optimizer.param_groups, set(map(id, mains))
        self._parameters = [
            [parameter for parameter in group["params"] if id(parameter) in main_ids] for group in self._param_groups
        ]
        sizes = [-(-main.numel() // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS for main in mains for _ in MOMENTS]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self.memory = blocks.block(self._starts[-1] * torch.float32.itemsize)
        self._on_host = self.memory.view(torch.float32).zero_()
        """First and second moments of all parameters in turn, [elements]."""
        self._on_device: Tensor | None = None
        self._come: Any = None
        """Event for the completion of the copy to the device."""
        self._gone: Any = None
        """Event for the completion of the copy to the host."""
        for main, moments in self._moments(self._on_host):
            give_moments(part, main, moments)

    def come(self, arriving: CopyStream) -> None:
        """Starts the copy of the moments to the device."""
        # allocated on the compute stream, since the copy begins after all work that used the memory before
        self._on_device = torch.empty_like(self._on_host, device=self._device)
        with arriving.copying():
            self._on_device.copy_(self._on_host, non_blocking=True)
        self._come = arriving.moment()

    def begin(self, arriving: CopyStream) -> None:
        """Waits for the moments, and shows the optimizer only these parameters."""
        assert self._on_device is not None
        arriving.wait(self._come)
        for group, parameters in zip(self._param_groups, self._parameters, strict=True):
            group["params"] = parameters
        self._use(self._on_device)

    def go(self, leaving: CopyStream) -> None:
        """Starts the copy to the host, which begins after the current update."""
        assert self._on_device is not None
        self._use(self._on_host)
        with leaving.copying():
            self._on_host.copy_(self._on_device, non_blocking=True)
        self._gone = leaving.moment()

    def free(self, leaving: CopyStream) -> None:
        """Releases the device memory; later work waits for the copy."""
        leaving.wait(self._gone)
        self._on_device = None

    def _use(self, memory: Tensor) -> None:
        for state, (_, moments) in zip(self._states, self._moments(memory), strict=True):
            state.update(moments)

    def _moments(self, memory: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields each parameter with its moments, as views of `memory`."""
        starts = iter(self._starts)
        for main in self._mains:
            yield main, {name: _part(memory, next(starts), main) for name in MOMENTS}


def _part(memory: Tensor, start: int, main: Tensor) -> Tensor:
    return memory[start : start + main.numel()].view(main.shape)


def _grouped(mains: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups parameters in order; a group has one parameter, or moments that fit into MOMENTS_AT_ONCE_BYTES."""
    group, size = list[Tensor](), 0
    for main in mains:
        needed = len(MOMENTS) * main.nbytes
        if group and size + needed > MOMENTS_AT_ONCE_BYTES:
            yield group
            group, size = [], 0
        group.append(main)
        size += needed
    if group:
        yield group
