"""Bad steps of a run, as a checkpoint keeps them."""

from typing import NamedTuple

from mtrain.checkpoint.format.training_state import RecentUpdates
from mtrain.checkpoint.store.manifest import SkippedInfo


class BadStepHistory(NamedTuple):
    """Skipped steps of a run, and the updates by which the next step is judged."""

    skipped: tuple[SkippedInfo, ...] = ()
    """Steps that were left out, ascending."""
    recent: RecentUpdates | None = None
    """Latest updates where train.on_spike is set; else None."""


NO_BAD_STEPS = BadStepHistory()
"""History of a run that begins."""
