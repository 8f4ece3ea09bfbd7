"""Description of a known fault; `mtrain.verify.planted.inject` lists them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config import Config


@dataclass(frozen=True)
class Fault:
    """Known fault, with the conditions under which it shows."""

    name: str
    text: str
    """Description of what the faulty trainer does."""
    axis: str | None
    """Axis of the layout that the fault needs; None: one process with one microbatch shows it."""
    condition: Callable[[Config], bool] = lambda config: True
    """Function that says whether the fault can show under a configuration."""
    condition_text: str = ""
    shown_by: int = 1
    """Step on random batches that reveals the fault: the second has weights other than 0 and 1, the third few loss
    tokens."""


def side_terms_differ(config: Config) -> bool:
    """Says whether a side term has another denominator than the main term."""
    main, sides = config.loss, config.loss.side_terms.values()
    return any((side.aggregation, side.empty_sequences) != (main.aggregation, main.empty_sequences) for side in sides)
