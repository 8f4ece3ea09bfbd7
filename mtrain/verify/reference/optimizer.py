"""Exact optimizer of a configuration."""

from __future__ import annotations

from typing import assert_never

from mtrain.config import Config
from mtrain.config.schema.train import AdamWSection, MuonSection
from mtrain.verify.reference.adamw import AdamW, Moments
from mtrain.verify.reference.muon import ExactMuon


def exact_optimizer(config: Config, start: Moments = Moments(0, {}, {})) -> AdamW | ExactMuon:  # noqa: B008
    """Makes the optimizer of a configuration in float64.

    Args:
        config: Configuration with kind and constants of the optimizer, and the model.
        start: State after some updates.
    """
    match config.optimizer:
        case AdamWSection():
            return AdamW(config.optimizer, start)
        case MuonSection():
            return ExactMuon(config.optimizer, config.model, start)
        case _:
            assert_never(config.optimizer)
