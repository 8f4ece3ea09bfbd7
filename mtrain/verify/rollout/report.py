"""Report of `mtrain verify rollout` as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mtrain.verify.core.result import encoded
from mtrain.verify.rollout.causes import Spread

FORMAT = 1
"""Version of the JSON file; raised when a field changes meaning."""
JSON_NAME, PAGE_NAME = "rollout.json", "rollout.html"


@dataclass(frozen=True)
class Side:
    """Log-probabilities of the engine or trainer, compared with exact ones."""

    name: str
    """`rollout`, or `trainer` with its layout."""
    dtype: str
    spread: Spread
    allowed: Spread
    """Largest explained differences: 4 times those of the reference in this precision."""
    mean: float
    """Mean signed difference in nats; near 0 for rounding."""

    @property
    def passed(self) -> bool:
        """Says whether rounding explains the differences."""
        return self.spread.within(self.allowed)


@dataclass(frozen=True)
class Finding:
    """Cause of a disagreement, known or not."""

    cause: str
    """Such as `temperature`, or `not explained`."""
    lines: tuple[str, str]
    """Fact and remedy."""


@dataclass(frozen=True)
class RolloutReport:
    """Everything that was compared."""

    created: str
    command: str
    environment: dict[str, str]
    model: str
    """Model as the user named it, with the step of its checkpoint."""
    file: str
    num_rollouts: int
    num_tokens: int
    """Tokens drawn by the model."""
    num_deviating: int
    """Rollouts with a token that rounding does not explain."""
    sides: tuple[Side, ...]
    """The rollout, then the trainer under each layout that ran; empty if an exact property is violated."""
    findings: tuple[Finding, ...]
    """Causes, most certain first; empty if all agree."""
    tried: tuple[tuple[str, Spread, bool], ...]
    """Tried causes: name and fact, remaining deviation, whether it explains."""
    tokens: tuple[tuple[float, ...], ...]
    """Exact log-probability, difference of the engine and difference of the trainer, by drawn token."""
    positions: tuple[tuple[float, float], ...]
    """Root mean square of both differences by position in the answer."""
    layers: Mapping[str, float]
    """Largest relative difference of hidden states by module in forward order; may be empty."""
    routes: str | None
    """How many choices of experts equal the reference's; None if none are given."""
    replay: str | None
    """Distance of rollout and trainer without and with the rollout's routes; None if none are given."""
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        """Says whether everything agrees."""
        return not self.findings

    def to_json(self) -> str:
        """Returns strict JSON; non-finite numbers become the texts "inf", "-inf" and "nan"."""
        return json.dumps(encoded(asdict(self)), allow_nan=False, separators=(",", ":"))
