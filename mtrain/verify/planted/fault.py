"""What a known fault is; `mtrain.verify.planted.inject` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config import Config


def _anything(config: Config) -> bool:
    return True


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what it takes to happen."""

    name: str
    text: str
    """What the faulty trainer does."""
    axis: str | None
    """The axis of the layout that it needs; None: one process with one microbatch shows it."""
    condition: Callable[[Config], bool] = _anything
    """Whether a configuration gives it a chance."""
    condition_text: str = ""
    shown_by: int = 1
    """The step on random batches that betrays it: weights other than 0 and 1 come second, few loss tokens third."""


def isolates_documents(config: Config) -> bool:
    """Whether rows hold documents that do not see each other."""
    return config.data.isolate_documents


def packs_sequences(config: Config) -> bool:
    """Whether a term is a mean over sequences of which a row may hold several."""
    terms = (config.loss, *config.loss.side_terms.values())
    return config.data.packing is not None and any(term.aggregation.startswith("seq-mean") for term in terms)


def packs(config: Config) -> bool:
    """Whether a row may hold several samples."""
    return config.data.packing is not None


def side_terms_differ(config: Config) -> bool:
    """Whether a side term is divided by something else than the main one."""
    main, sides = config.loss, config.loss.side_terms.values()
    return any((side.aggregation, side.empty_sequences) != (main.aggregation, main.empty_sequences) for side in sides)
