"""Checks whether the checkpoints and exports of a run fit on its disk."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mtrain.arch.adapters import num_adapter_parameters
from mtrain.arch.layout import Layout
from mtrain.arch.parameters import (
    FP32_BYTES,
    element_bytes,
    num_parameters,
    num_trained_parameters,
    trained_matrices_on_rank,
)
from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults
from mtrain.config import Config
from mtrain.config.schema.train import MuonSection
from mtrain.preflight.findings import Findings
from mtrain.runs.folder import RunFolder


@dataclass(frozen=True)
class DiskNeed:
    """Largest content of a run folder; metrics, logs and ledgers are small and not counted."""

    checkpoint_bytes: int
    num_checkpoints: int
    """Checkpoints that are kept, plus one that is written before another is deleted."""
    export_bytes: int
    num_exports: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoint_bytes * self.num_checkpoints + self.export_bytes * self.num_exports


def disk_need(config: Config) -> DiskNeed:
    """Estimates the disk space that a whole run needs; the layout does not matter."""
    section, num_steps = config.checkpoint, config.train.num_steps
    saves = num_steps // section.interval_steps if section.interval_steps else 0
    saves += 0 if section.interval_steps and num_steps % section.interval_steps == 0 else section.at_end
    forever = 0 if section.keep_every_steps is None else num_steps // section.keep_every_steps
    num_checkpoints = min(saves, section.keep_last + section.keep_best + forever + 1)
    exports = num_steps // section.export_hf_every_steps if section.export_hf_every_steps else 0
    export = num_parameters(config.model) * element_bytes(config.train)  # a Hugging Face folder has only the weights
    return DiskNeed(checkpoint_bytes(config), num_checkpoints, export, exports)


def checkpoint_bytes(config: Config) -> int:
    """Estimates the size of a checkpoint: weights in the run's precision and optimizer state in fp32.

    A run with adapters saves only these, and frozen weights have no optimizer state. Replicas are written once and
    vocabulary padding never, so the size does not depend on the layout.
    """
    model = config.model
    if config.adapter is None:
        saved, trained = num_parameters(model), num_trained_parameters(model)
    else:
        saved = trained = num_adapter_parameters(model, config.adapter)
    state_size = 3 * trained  # main weights, in fp32 the weights once more, and both moments
    if isinstance(config.optimizer, MuonSection):  # one momentum instead of two moments
        state_size -= trained_matrices_on_rank(model, Layout(), 0).total
    return saved * element_bytes(config.train) + state_size * FP32_BYTES


_GIB = 2**30


def look_at_disk(config: Config, findings: Findings) -> None:
    """Compares the space that the run still needs with the free space."""
    folder, need = RunFolder(Path(config.run.dir)), disk_need(config)
    existing = _nearest(folder.path)
    with findings.looking():
        with disk_faults(f"look at {existing}"):
            if not existing.is_dir():
                raise MachineError(f"run.dir={folder.path} is below {existing}, which is a file; name another folder")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise MachineError(
                    f"run.dir={folder.path} cannot be created: {existing} is not writable; change run.dir"
                )
            free = shutil.disk_usage(existing).free
            used = _bytes_below(folder.checkpoints) + _bytes_below(folder.exports)
        parts = f"{need.num_checkpoints} x {need.checkpoint_bytes / _GIB:.2f} GiB of checkpoints"
        if need.num_exports:
            parts += f" and {need.num_exports} x {need.export_bytes / _GIB:.2f} GiB of exports"
        there = f", of which {used / _GIB:.2f} GiB are written" if used else ""
        if need.total_bytes - used > free:
            raise MachineError(
                f"run.dir={folder.path} needs room for {parts}, {need.total_bytes / _GIB:.2f} GiB in all{there}, but "
                f"only {free / _GIB:.2f} GiB are free; lower checkpoint.keep_last={config.checkpoint.keep_last}, keep "
                "fewer with keep_every_steps, keep_best or export_hf_every_steps, or set run.dir to a larger disk"
            )
        findings.fact("disk", f"{parts}{there}; {free / _GIB:.1f} GiB are free")


def _nearest(path: Path) -> Path:
    """Returns the path itself, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
