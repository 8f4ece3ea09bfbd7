"""Export of a running engine, by way of a temporary checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults, remove
from mtrain.convert.exporting import export_hf
from mtrain.mcore.distributed.init import on_first_rank


def exported_beside(out: Path, save: Callable[[Path], Path]) -> None:
    """Saves a checkpoint, converts it, and deletes it. Collective over the world.

    Args:
        out: Path of the exported folder; must not exist.
        save: Function that saves into a run folder and returns the path of the checkpoint.

    Raises:
        ConfigError: `out` exists.
        DataError: No Hugging Face family can describe the model.
        MachineError: The disk refuses.
    """
    scratch = out.parent / f".{out.name}.checkpoint"
    on_first_rank(lambda: _cleared(out, scratch))
    try:
        checkpoint = save(scratch)
        on_first_rank(lambda: _exported(checkpoint, out))
    finally:
        # in `finally`: an export that fails must not leave a second copy of the weights on the disk
        on_first_rank(lambda: _removed(scratch))


def _cleared(out: Path, scratch: Path) -> None:
    """Refuses an existing folder before any work is done, and deletes what a dead export has left."""
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten; name another folder or move it away")
    _removed(scratch)


def _exported(checkpoint: Path, out: Path) -> None:
    """Converts the checkpoint in one thread, one tensor at a time; each is read back and compared."""
    export_hf(checkpoint, out, like=None, dtype=None, num_workers=1)


def _removed(folder: Path) -> None:
    with disk_faults(f"delete {folder}"):
        if folder.exists():
            remove(folder)
