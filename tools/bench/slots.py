"""Bubble of a pipeline: what its ranks run in which order, and how long that takes if nothing else costs time.

A forward slot takes one unit per virtual stage, a backward slot two; a slot begins when its rank is free and its inputs
are there. By the formula, (p - 1) / (m v + p - 1) of the step is bubble: p ranks, m microbatches, v virtual stages. Or
a slot takes its measured processor seconds: then uneven stages and the host's time count as well, but not that ranks
share cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mtrain.arch.layout import Layout

FORWARD_UNITS, BACKWARD_UNITS = 1.0, 2.0


class Slot(NamedTuple):
    """Forward or backward pass of one microbatch through one stage."""

    is_forward: bool
    stage: int
    """Number of the stage in model order."""
    microbatch: int


class Timeline(NamedTuple):
    """Slots of one rank."""

    slots: list[Slot]
    """Slots in the order in which they began."""
    began: list[float]
    """Processor seconds of this process at the beginning of each slot."""

    def costs(self, end: float) -> list[float]:
        """Returns the processor seconds from each slot to the next one, or to the `end`."""
        return [after - before for before, after in zip(self.began, [*self.began[1:], end])]


@contextmanager
def recorded(chunks: Sequence[Any], layout: Layout, pp_rank: int) -> Iterator[Timeline]:
    """Records the slots of this rank inside the block."""
    found = Timeline([], [])
    handles = []
    for number, chunk in enumerate(chunks):
        stage = layout.stage(pp_rank, number)
        handles.append(chunk.register_forward_pre_hook(lambda module, inputs: found.began.append(time.process_time())))
        handles.append(chunk.register_forward_hook(_noting(found, stage)))
    yield found
    for handle in handles:
        handle.remove()


def _noting(found: Timeline, stage: int) -> Callable[[Any, Any, Any], None]:
    count = 0

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        number, count = count, count + 1
        found.slots.append(Slot(True, stage, number))

        def begin(grad: Any) -> None:
            found.slots.append(Slot(False, stage, number))
            found.began.append(time.process_time())

        # the last stage returns hidden states whose logits are computed later
        tensor = output.main.hidden if hasattr(output, "main") else output
        tensor.register_hook(begin)

    return note


def bubble(ranks: Sequence[Sequence[Slot]], layout: Layout, costs: Sequence[Sequence[float]] | None = None) -> float:
    """Returns the share of the step in which ranks have nothing to run, averaged over the ranks.

    Args:
        ranks: Slots of each rank, in their order.
        layout: Layout with the stages.
        costs: Cost of each slot; by default one unit forward and two backward, divided by the number of virtual stages.

    Raises:
        ValueError: The ranks wait for each other in a circle.
    """
    if costs is None:
        costs = [
            [(FORWARD_UNITS if each.is_forward else BACKWARD_UNITS) / layout.vpp for each in slots] for slots in ranks
        ]
    last, done = layout.num_stages - 1, dict[Slot, float]()
    waiting = [list(zip(slots, of_rank, strict=True)) for slots, of_rank in zip(ranks, costs, strict=True)]
    free = [0.0] * len(ranks)
    while any(waiting):
        moved = False
        for rank, slots in enumerate(waiting):
            while slots and all(need in done for need in _needs(slots[0][0], last)):
                slot, cost = slots.pop(0)
                begin = max([free[rank], *(done[need] for need in _needs(slot, last))])
                free[rank] = done[slot] = begin + cost
                moved = True
        if not moved:
            raise ValueError("ranks wait for each other")
    return 1 - sum(map(sum, costs)) / len(ranks) / max(free)


def _needs(slot: Slot, last: int) -> list[Slot]:
    """Returns the slots that have to be over before this one."""
    if slot.is_forward:
        return [slot._replace(stage=slot.stage - 1)] * (slot.stage > 0)
    return [Slot(True, slot.stage, slot.microbatch), *[slot._replace(stage=slot.stage + 1)] * (slot.stage < last)]


def formula(layout: Layout, microbatches: int) -> float:
    """Returns (p - 1) / (m v + p - 1)."""
    return (layout.pp - 1) / (microbatches * layout.vpp + layout.pp - 1)
