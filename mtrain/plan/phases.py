"""Phases of a run: the blend that is trained at each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.schema.data import AnyData, FilesSection, SourceSection


@dataclass(frozen=True)
class DataPhase:
    """One blend of `data.train` or `data.curriculum`."""

    from_step: int
    """Number of updates completed before the blend begins."""
    shares: dict[str, float]
    """Path of a source -> its share of the samples, at most 1."""

    def __str__(self) -> str:
        shares = " + ".join(f"{share:.4g} {path}" for path, share in self.shares.items())
        return f"from step {self.from_step + 1} on: {shares}"


def data_phases(data: AnyData) -> tuple[DataPhase, ...]:
    """Returns the phases of a configuration, in their order; empty without a curriculum."""
    if not isinstance(data, FilesSection) or not data.curriculum:
        return ()
    later = [(blend.from_step, blend.sources) for blend in data.curriculum]
    return tuple(DataPhase(step, _shares(sources)) for step, sources in [(0, data.train), *later])


def _shares(sources: Sequence[SourceSection]) -> dict[str, float]:
    total = sum(source.weight for source in sources)
    return {source.path: source.weight / total for source in sources}


def phase_number(phases: Sequence[DataPhase], step: int) -> int:
    """Returns the number of the phase of a step, both counted from 1; 0 where there are no phases."""
    return sum(phase.from_step < step for phase in phases)
