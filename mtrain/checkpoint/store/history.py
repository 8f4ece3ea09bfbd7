"""What a checkpoint knows of the bad steps of its run."""

from typing import NamedTuple

from mtrain.checkpoint.format.training_state import RecentUpdates
from mtrain.checkpoint.store.manifest import SkippedInfo


class BadStepHistory(NamedTuple):
    """Those that were left out, and by what the next step is judged."""

    skipped: tuple[SkippedInfo, ...] = ()
    """Ascending."""
    recent: RecentUpdates | None = None
    """Where train.on_spike is set."""


NO_BAD_STEPS = BadStepHistory()
"""Of a run that begins."""
