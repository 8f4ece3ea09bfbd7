"""Table of the silent faults of megatron-core 0.16.1 and 0.19.2, and what we do about each.

A row names the fault, its place in the sources, the condition on a configuration, and the outcome: fixed by
construction, refused, noted in the log, or out of reach. docs/proof/known-issues.md and docs/proof/megatron-lm-7452.md
are written from this table.
"""

from __future__ import annotations

from mtrain.arch.layout import Layout
from mtrain.config import Config
from tests.known_issues.rows import balance, checkpoint, experts, layers, loss, mla, mtp, optimizer, schedules
from tests.known_issues.rows.row import VERSION, KnownIssue

__all__ = ["GROUPS", "TABLE", "VERSION", "KnownIssue", "applicable"]

GROUPS: dict[str, tuple[KnownIssue, ...]] = {
    "Loss and normalisation": loss.ROWS,
    "Model, initial weights and pipeline": layers.ROWS,
    "Latent attention": mla.ROWS,
    "Experts": experts.ROWS,
    "Balancing experts": balance.ROWS,
    "Multi-token prediction": mtp.ROWS,
    "Optimizer": optimizer.ROWS,
    "Checkpoints": checkpoint.ROWS,
    "Schedules, layers and models that are not built": schedules.ROWS,
}
"""Rows of the table by heading."""

TABLE: tuple[KnownIssue, ...] = tuple(row for rows in GROUPS.values() for row in rows)


def applicable(config: Config, layout: Layout) -> list[KnownIssue]:
    """Returns the faults that this configuration would meet in plain Megatron-Core."""
    return [row for row in TABLE if row.applies(config, layout)]
