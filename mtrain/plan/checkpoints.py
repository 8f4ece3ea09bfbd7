"""Disk space of a run: size and largest number of its checkpoints and exports."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config import Config
from mtrain.config.schema.train import MuonSection
from mtrain.plan.activations import FP32_BYTES, element_bytes
from mtrain.plan.adapters import num_adapter_parameters
from mtrain.plan.layout import Layout
from mtrain.plan.parameters import matrices_on_rank, num_parameters


@dataclass(frozen=True)
class DiskNeed:
    """Largest content of a run folder; metrics, logs and ledgers, which are small, are not counted."""

    checkpoint_bytes: int
    """Size of one checkpoint."""
    num_checkpoints: int
    """Number of checkpoints that are kept, and one that is being written while none has been deleted for it yet."""
    export_bytes: int
    """Size of one export."""
    num_exports: int

    @property
    def total_bytes(self) -> int:
        """Sums up checkpoints and exports."""
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes * self.num_exports


def disk_need(config: Config) -> DiskNeed:
    """Estimates the disk space of a whole run of `config`, whatever its layout."""
    section, num_steps = config.checkpoint, config.train.num_steps
    saves = num_steps // section.interval_steps if section.interval_steps else 0
    saves += 0 if section.interval_steps and num_steps % section.interval_steps == 0 else section.at_end
    forever = 0 if section.keep_every_steps is None else num_steps // section.keep_every_steps
    num_checkpoints = min(saves, section.keep_last + section.keep_best + forever + 1)
    exports = num_steps // section.export_hf_every_steps if section.export_hf_every_steps else 0
    export = num_parameters(config.model) * element_bytes(config.train)  # a folder of Hugging Face: the weights alone
    return DiskNeed(checkpoint_bytes(config), num_checkpoints, export, exports)


def checkpoint_bytes(config: Config) -> int:
    """Estimates the size of a checkpoint: weights in the run's precision, the optimizer's numbers in fp32; for adapters
    those alone.

    Replicas are written once, and padding of the vocabulary not at all, so the size does not depend on the layout.
    """
    model = config.model
    trained = num_parameters(model) if config.adapter is None else num_adapter_parameters(model, config.adapter)
    kept = 3 * trained  # main weights, in fp32 the weights once more, and both moments
    if isinstance(config.optimizer, MuonSection):  # a momentum in the place of two moments
        kept -= matrices_on_rank(model, Layout(), 0).total
    return trained * element_bytes(config.train) + kept * FP32_BYTES
