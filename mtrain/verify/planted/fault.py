"""Description of a known fault; `mtrain.verify.planted.inject` lists them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config import Config


@dataclass(frozen=True)
class Fault:
    """Known fault and the conditions under which it shows."""

    name: str
    text: str
    """What the faulty trainer does."""
    axis: str | None
    """Axis that the layout must use; None: one process with one microbatch shows the fault."""
    condition: Callable[[Config], bool] = lambda config: True
    """Says whether the fault can show under a configuration."""
    condition_text: str = ""
    shown_by: int = 1
    """First step on random batches that reveals the fault: the second has fractional weights, the third few loss
    tokens."""


def side_terms_differ(config: Config) -> bool:
    """Says whether a side term has another denominator than the main term."""
    main, sides = config.loss, config.loss.side_terms.values()
    return any((side.aggregation, side.empty_sequences) != (main.aggregation, main.empty_sequences) for side in sides)
