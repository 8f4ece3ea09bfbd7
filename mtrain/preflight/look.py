"""Everything that can be looked at before a start, in one call."""

from __future__ import annotations

from mtrain.config import Config
from mtrain.preflight.disk import look_at_disk
from mtrain.preflight.files import look_at_files
from mtrain.preflight.findings import Findings


def look(config: Config, findings: Findings) -> None:
    """Opens the files that a run would open, and asks its disks for room.

    Args:
        config: Of the run.
        findings: Takes what is found.
    """
    look_at_files(config, findings)
    look_at_disk(config, findings)
