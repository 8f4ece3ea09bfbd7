"""Which checkpoints stay."""

from collections.abc import Iterable
from pathlib import Path

from mtrain.checkpoint.directory import delete_checkpoint, load_entry, published_steps, step_name
from mtrain.errors import DataError


def to_delete(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Steps that may go, ascending.

    Args:
        steps: Steps of the good checkpoints, in any order.
        keep_last: The newest so many stay; at least 1.
        keep_every: Multiples of this stay for ever; None: none does.
    """
    assert keep_last > 0, "the newest checkpoint is never deleted"
    older = sorted(set(steps))[:-keep_last]
    return [step for step in older if keep_every is None or step % keep_every != 0]


def apply_retention(root: Path, keep_last: int, keep_every: int | None) -> list[int]:
    """Deletes what may go; gives the deleted steps.

    Damaged checkpoints neither count nor go, so the newest good one always stays.

    Raises:
        MachineError: the disk refuses.
    """
    doomed = to_delete(_good_steps(root), keep_last, keep_every)
    for step in doomed:
        delete_checkpoint(root, step)
    return doomed


def _good_steps(root: Path) -> list[int]:
    return [step for step in published_steps(root) if _is_good(root / step_name(step))]


def _is_good(path: Path) -> bool:
    try:
        load_entry(path)
    except DataError:
        return False
    return True
