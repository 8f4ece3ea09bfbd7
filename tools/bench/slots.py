"""The bubble of a pipeline: what its ranks run in which order, and how long that takes if nothing else costs time.

A forward slot takes one unit a virtual stage, a backward slot two; a slot begins when its rank is free and what it
needs is there. By the formula (p - 1) / (m v + p - 1) of the step is bubble: p ranks, m microbatches, v virtual stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mtrain.plan.layout import Layout

FORWARD_UNITS, BACKWARD_UNITS = 1.0, 2.0


class Slot(NamedTuple):
    """Of one rank."""

    is_forward: bool
    stage: int
    """In model order."""
    microbatch: int


@contextmanager
def recorded(chunks: Sequence[Any], layout: Layout, pp_rank: int) -> Iterator[list[Slot]]:
    """Slots of this rank inside the block, in the order in which they began."""
    slots: list[Slot] = []
    handles = []
    for number, chunk in enumerate(chunks):
        stage = layout.stage(pp_rank, number)
        handles.append(chunk.register_forward_hook(_noting(slots, stage)))
    yield slots
    for handle in handles:
        handle.remove()


def _noting(slots: list[Slot], stage: int) -> Callable[[Any, Any, Any], None]:
    count = 0

    def note(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        number, count = count, count + 1
        slots.append(Slot(True, stage, number))
        # the last stage hands over hidden states whose logits come later
        tensor = output.main.hidden if hasattr(output, "main") else output
        tensor.register_hook(lambda grad: slots.append(Slot(False, stage, number)))

    return note


def bubble(ranks: Sequence[Sequence[Slot]], layout: Layout) -> float:
    """Share of the step in which a rank has nothing to run.

    Raises:
        ValueError: The ranks wait for each other in a circle.
    """
    last, done = layout.num_stages - 1, dict[Slot, float]()
    waiting, free = [list(slots) for slots in ranks], [0.0] * len(ranks)
    while any(waiting):
        moved = False
        for rank, slots in enumerate(waiting):
            while slots and all(need in done for need in _needs(slots[0], last)):
                slot = slots.pop(0)
                begin = max([free[rank], *(done[need] for need in _needs(slot, last))])
                free[rank] = done[slot] = begin + (FORWARD_UNITS if slot.is_forward else BACKWARD_UNITS) / layout.vpp
                moved = True
        if not moved:
            raise ValueError("ranks wait for each other")
    work = sum(FORWARD_UNITS if each.is_forward else BACKWARD_UNITS for each in ranks[0]) / layout.vpp
    return 1 - work / max(free)


def _needs(slot: Slot, last: int) -> list[Slot]:
    """What has to be over before it."""
    if slot.is_forward:
        return [slot._replace(stage=slot.stage - 1)] * (slot.stage > 0)
    return [Slot(True, slot.stage, slot.microbatch), *[slot._replace(stage=slot.stage + 1)] * (slot.stage < last)]


def formula(layout: Layout, microbatches: int) -> float:
    """(p - 1) / (m v + p - 1)."""
    return (layout.pp - 1) / (microbatches * layout.vpp + layout.pp - 1)
