"""Report of `mtrain verify rollout` as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mtrain.verify.core.result import encoded
from mtrain.verify.rollout.causes import Spread

FORMAT = 1
"""Version of the JSON file; raised when a field changes its meaning."""
JSON_NAME, PAGE_NAME = "rollout.json", "rollout.html"


@dataclass(frozen=True)
class Side:
    """Log-probabilities of the engine or of the trainer compared with the exact ones."""

    name: str
    """`rollout`, or `trainer` with its layout."""
    dtype: str
    spread: Spread
    allowed: Spread
    """Largest differences that rounding explains: 4 times those of the reference computed in this precision."""
    mean: float
    """Mean of the differences with their sign, in nats; rounding has a mean near 0."""

    @property
    def passed(self) -> bool:
        """Says whether rounding explains the differences."""
        return self.spread.within(self.allowed)


@dataclass(frozen=True)
class Finding:
    """Cause of a disagreement, or the statement that none is known."""

    cause: str
    """Name of the cause, such as `temperature`; `not explained`."""
    lines: tuple[str, str]
    """What is the case, and what to change."""


@dataclass(frozen=True)
class RolloutReport:
    """Everything that was compared."""

    created: str
    command: str
    environment: dict[str, str]
    model: str
    """Model as it was named, with the step of its checkpoint."""
    file: str
    num_rollouts: int
    num_tokens: int
    """Tokens that the model drew."""
    num_deviating: int
    """Rollouts with a token that rounding does not explain."""
    sides: tuple[Side, ...]
    """The rollout first, then the trainer under each layout that ran; empty if an exact property is missing."""
    findings: tuple[Finding, ...]
    """Causes, the most certain first; empty if all agree."""
    tried: tuple[tuple[str, Spread, bool], ...]
    """Causes that were tried: name and fact, what is left of the deviation, and whether it explains it."""
    tokens: tuple[tuple[float, ...], ...]
    """Exact log-probability, difference of the engine and difference of the trainer by token of all answers."""
    positions: tuple[tuple[float, float], ...]
    """Root mean square of both differences by place in the answer."""
    layers: Mapping[str, float]
    """Largest relative difference of hidden states by module, in the order of the forward pass; empty if none are
    given."""
    routes: str | None
    """How many choices of experts are those of the reference; None if none are given."""
    replay: str | None
    """How far rollout and trainer are apart without, and with, the rollout's routes; None if none are given."""
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        """Says whether everything agrees."""
        return not self.findings

    def to_json(self) -> str:
        """Returns strict JSON: numbers that are not finite become the texts "inf", "-inf" and "nan"."""
        return json.dumps(encoded(asdict(self)), allow_nan=False, separators=(",", ":"))
