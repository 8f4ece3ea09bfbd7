"""All checks before a start, in one call."""

from __future__ import annotations

from mtrain.config import Config
from mtrain.metrics.trackers.open import refuse_missing
from mtrain.preflight.disk import look_at_disk
from mtrain.preflight.findings import Findings
from mtrain.preflight.start import look_at_start


def look(config: Config, findings: Findings) -> None:
    """Goes through a start, checks its disks for room, and looks for the libraries of its trackers.

    Args:
        config: Configuration of the run.
        findings: Findings to add to.
    """
    if config.metrics.trackers:
        with findings.looking():
            refuse_missing(config.metrics.trackers)
            findings.fact("trackers", ", ".join(config.metrics.trackers))
    look_at_start(config, findings)
    look_at_disk(config, findings)
