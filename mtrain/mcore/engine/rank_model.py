"""What a rank has of a model: the value that every pass, save and load works on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel

from mtrain.config import Config
from mtrain.mcore.distributed.groups import Groups
from mtrain.mcore.engine.optimizer import Optimizer


@dataclass(frozen=True)
class RankModel:
    """This rank's part of the model and of its optimizer."""

    config: Config
    """The configuration of the run."""
    groups: Groups
    """The process groups."""
    chunks: list[DistributedDataParallel]
    """The model chunks in DDP, one for each virtual pipeline stage."""
    optimizer: Optimizer
    """The optimizer of these chunks."""
