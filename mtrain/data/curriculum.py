"""Blends that replace each other at given steps (`data.curriculum`): their samples and fingerprints.

All steps hold equally many samples, so a blend begins at a fixed sample of the run's order. The fingerprint names these
steps, so that two can be compared up to a step: later phases may change under a run, trained ones may not.
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
    """A blend and its first step."""

    step: int
    """Updates completed before the blend begins."""
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
    """Builds the fingerprint of all data of a run."""
    for blend in later:
        # numbers too: two sources with the same content may be at different places of their epochs
        shares = zip(blend.phase.weights, blend.phase.sources)
        parts = "+".join(f"{weight:g}*{number}:{of_sources[number]}" for weight, number in shares)
        fingerprint += _FROM.format(blend.step) + parts
    return fingerprint


def has_phases(fingerprint: str) -> bool:
    """Says whether a fingerprint has more than one blend."""
    return _EDGE.search(fingerprint) is not None


def fingerprint_until(fingerprint: str, step: int) -> str:
    """Cuts a fingerprint down to what decides the samples of the first `step` steps."""
    edge = next((edge for edge in _EDGE.finditer(fingerprint) if int(edge[1]) >= step), None)
    return fingerprint if edge is None else fingerprint[: edge.start()]
