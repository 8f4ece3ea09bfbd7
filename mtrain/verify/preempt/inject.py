"""Known faults of stopping, each planted between two starts, to show that the drill finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtrain.base.heartbeat import Phase
from mtrain.config.load import config_yaml, load_config
from mtrain.verify.planted.fault import Fault
from mtrain.verify.preempt.start import Stop

PREEMPT_FAULTS = (
    Fault("record-lost", "loses the last record that was written before the stop", None),
    Fault("record-repeated", "writes the last record before the stop a second time", None),
    Fault("rate-changed", "goes on with another learning rate than the run had", None),
)


def plant(name: str | None, stop: Stop, run_dir: Path, config: Path) -> None:
    """Does to a stopped run what a faulty trainer would have done.

    Args:
        name: Name of one of PREEMPT_FAULTS; None: nothing.
        stop: Stop that the run has just made.
        run_dir: Run folder.
        config: Configuration file of the run, which the next start reads.
    """
    if name is not None and stop.phase is Phase.FORWARD_BACKWARD:
        _PLANTS[name](run_dir / "metrics.jsonl", config)


def _lose_record(metrics: Path, config: Path) -> None:
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))


def _repeat_record(metrics: Path, config: Path) -> None:
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines, lines[-1]]))


def _change_rate(metrics: Path, config: Path) -> None:
    before = load_config([config], [])
    optimizer = before.optimizer.model_copy(update={"lr": 1.5 * before.optimizer.lr})
    allowed = before.checkpoint.model_copy(update={"allow_changed": (*before.checkpoint.allow_changed, "optimizer.lr")})
    config.write_text(config_yaml(before.model_copy(update={"optimizer": optimizer, "checkpoint": allowed})))


_PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "record-lost": _lose_record,
    "record-repeated": _repeat_record,
    "rate-changed": _change_rate,
}
"""Functions by the name of the fault, called with metrics.jsonl and the configuration file."""
