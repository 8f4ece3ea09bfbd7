"""Which checkpoints stay."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mtrain.checkpoint.directory import delete_checkpoint, load_entry, published_steps, step_name
from mtrain.errors import DataError


class Keep(NamedTuple):
    """What is kept; one rule suffices."""

    last: int
    """The newest so many; at least 1."""
    every: int | None = None
    """Multiples of this, for ever; None: none."""
    best: int = 0
    """So many with the lowest validation loss; of equal ones the newer."""


def to_delete(steps: Iterable[int], keep: Keep, valid_losses: Mapping[int, float] | None = None) -> list[int]:
    """Steps that may go, ascending.

    Args:
        steps: Steps of the good checkpoints, in any order.
        keep: The rules.
        valid_losses: Step -> validation loss, of those that have one.
    """
    assert keep.last > 0, "the newest checkpoint is never deleted"
    losses = valid_losses or {}
    best = set(sorted(losses, key=lambda step: (losses[step], -step))[: keep.best])
    older = sorted(set(steps))[: -keep.last]
    return [step for step in older if step not in best and (keep.every is None or step % keep.every != 0)]


def apply_retention(root: Path, keep: Keep) -> list[int]:
    """Deletes what may go; gives the deleted steps.

    Damaged checkpoints neither count nor go, so the newest good one always stays; what is being read stays for now.

    Raises:
        MachineError: the disk refuses.
    """
    good = _good_steps(root)
    losses = {step: loss for step, loss in good.items() if loss is not None}
    return [step for step in to_delete(good, keep, losses) if delete_checkpoint(root, step)]


def _good_steps(root: Path) -> dict[int, float | None]:
    """Step -> validation loss, if it has one."""
    good: dict[int, float | None] = {}
    for step in published_steps(root):
        try:
            good[step] = load_entry(root / step_name(step)).manifest.valid_loss
        except DataError:
            continue
    return good
