"""The value that every pass, save and load works on: this rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel

from mtrain.config import Config
from mtrain.core.engine.optimizer import Optimizer
from mtrain.core.ranks.groups import Groups


@dataclass(frozen=True)
class RankModel:
    """This rank's part of the model and of its optimizer."""

    config: Config
    """Configuration of the run."""
    groups: Groups
    """Process groups of this rank."""
    chunks: list[DistributedDataParallel]
    """Model chunks in DDP, one for each virtual pipeline stage."""
    optimizer: Optimizer
    """Optimizer of these chunks."""
