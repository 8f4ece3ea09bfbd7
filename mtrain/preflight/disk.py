"""Check that the future checkpoints and exports fit on the disk of the run folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mtrain.base.errors import MachineError
from mtrain.base.files import disk_faults
from mtrain.config import Config
from mtrain.plan.checkpoints import disk_need
from mtrain.preflight.findings import Findings
from mtrain.runs.folder import RunFolder

_GIB = 2**30


def look_at_disk(config: Config, findings: Findings) -> None:
    """Compares the space that the run will need with the free space and with what an earlier start has written already.

    Args:
        config: Configuration of the run.
        findings: Findings to add to.
    """
    folder, need = RunFolder(Path(config.run.dir)), disk_need(config)
    place = _nearest(folder.path)
    with findings.looking():
        with disk_faults(f"look at {place}"):
            if not place.is_dir():
                raise MachineError(f"run.dir={folder.path} lies below {place}, which is a file; name another folder")
            if not os.access(place, os.W_OK | os.X_OK):
                raise MachineError(f"run.dir={folder.path} cannot be made: {place} may not be written; change run.dir")
            free = shutil.disk_usage(place).free
            held = _bytes_below(folder.checkpoints) + _bytes_below(folder.exports)
        parts = f"{need.num_checkpoints} x {need.checkpoint_bytes / _GIB:.2f} GiB of checkpoints"
        if need.num_exports:
            parts += f" and {need.num_exports} x {need.export_bytes / _GIB:.2f} GiB of exports"
        there = f", of which {held / _GIB:.2f} GiB are there" if held else ""
        if need.total_bytes - held > free:
            raise MachineError(
                f"run.dir={folder.path} will hold {parts}, which are {need.total_bytes / _GIB:.2f} GiB{there}, but "
                f"{free / _GIB:.2f} GiB are free; lower checkpoint.keep_last={config.checkpoint.keep_last}, keep fewer "
                "by keep_every_steps, keep_best or export_hf_every_steps, or set run.dir to a larger disk"
            )
        findings.fact("disk", f"{parts}{there}; {free / _GIB:.1f} GiB are free")


def _nearest(path: Path) -> Path:
    """Returns the folder itself, or the nearest one above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
