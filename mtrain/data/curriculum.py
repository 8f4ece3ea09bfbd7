"""Blends that replace each other at given steps (`data.curriculum`): their samples and their fingerprints.

A step holds equally many samples, so the step from which a blend holds is a sample of the run's order, and which
sample comes when stays arithmetic. The fingerprint of such data names the steps, so that two of them can be compared
up to a step: what follows later may change under a run, what was trained may not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.schema.data import FilesSection, SourceSection
from mtrain.core.batch.order import BlendPhase

_FROM = " from step {}: "
_EDGE = re.compile(r" from step (\d+): ")


@dataclass(frozen=True)
class BlendFrom:
    """A blend and the step at which it begins."""

    step: int
    """Number of updates completed before the blend begins."""
    phase: BlendPhase


def later_blends(data: FilesSection, global_batch_size: int) -> tuple[BlendFrom, ...]:
    """Returns the blends of `data.curriculum`, each with its first step."""
    numbers = {source.path: number for number, source in enumerate(data.all_sources)}
    return tuple(
        BlendFrom(blend.from_step, _phase(blend.from_step * global_batch_size, blend.sources, numbers))
        for blend in data.curriculum
    )


def _phase(first: int, sources: Sequence[SourceSection], numbers: dict[str, int]) -> BlendPhase:
    return BlendPhase(first, tuple(numbers[each.path] for each in sources), tuple(each.weight for each in sources))


def with_later(fingerprint: str, later: Sequence[BlendFrom], of_sources: Sequence[str]) -> str:
    """Builds the fingerprint of all data of a run.

    Args:
        fingerprint: Fingerprint of the first blend.
        later: Blends that follow it.
        of_sources: Fingerprints of the sources, by number.
    """
    for blend in later:
        # numbers too: two sources may have the same content and lie at different places of their epochs
        shares = zip(blend.phase.weights, blend.phase.sources)
        parts = "+".join(f"{weight:g}*{number}:{of_sources[number]}" for weight, number in shares)
        fingerprint += _FROM.format(blend.step) + parts
    return fingerprint


def has_phases(fingerprint: str) -> bool:
    """Says whether a fingerprint is of data with more than one blend."""
    return _EDGE.search(fingerprint) is not None


def fingerprint_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint down to the part that decides which samples the first `step` steps hold."""
    edge = next((edge for edge in _EDGE.finditer(fingerprint) if int(edge[1]) >= step), None)
    return fingerprint if edge is None else fingerprint[: edge.start()]
