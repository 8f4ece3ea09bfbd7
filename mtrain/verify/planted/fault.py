"""Description of a known fault; `mtrain.verify.planted.inject` lists them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config import Config


def _anything(config: Config) -> bool:
    return True


@dataclass(frozen=True)
class Fault:
    """Known fault, with the conditions under which it shows."""

    name: str
    text: str
    """Description of what the faulty trainer does."""
    axis: str | None
    """Axis of the layout that the fault needs; None: one process with one microbatch shows it."""
    condition: Callable[[Config], bool] = _anything
    """Function that says whether the fault can show under a configuration."""
    condition_text: str = ""
    shown_by: int = 1
    """Step on random batches that reveals the fault: the second has weights other than 0 and 1, the third few loss
    tokens."""


def isolates_documents(config: Config) -> bool:
    """Says whether rows hold documents that do not attend to each other."""
    return config.data.isolate_documents


def packs_sequences(config: Config) -> bool:
    """Says whether a term is a mean over sequences of which a row may hold several."""
    terms = (config.loss, *config.loss.side_terms.values())
    return config.data.packing is not None and any(term.aggregation.startswith("seq-mean") for term in terms)


def packs(config: Config) -> bool:
    """Says whether a row may hold several samples."""
    return config.data.packing is not None


def side_terms_differ(config: Config) -> bool:
    """Says whether a side term has another denominator than the main term."""
    main, sides = config.loss, config.loss.side_terms.values()
    return any((side.aggregation, side.empty_sequences) != (main.aggregation, main.empty_sequences) for side in sides)
