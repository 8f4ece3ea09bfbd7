"""Pictures of the loss curves of one or more runs."""

import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mtrain.base.errors import DataError
from mtrain.base.files import disk_faults, replacing
from mtrain.report.metrics.jsonl import read_records
from mtrain.report.metrics.record import ChangeRecord, StepRecord, ValidRecord
from mtrain.report.metrics.shown import curve_colour

SMOOTH_ABOVE_STEPS = 100
"""Longer curves are drawn in a light tone under their running mean over a fiftieth of the steps."""


@dataclass(frozen=True)
class Curves:
    """Records of a run for its picture."""

    steps: list[StepRecord]
    """Records in order of the step; if a step was written twice, the last record."""
    passes: list[ValidRecord]
    changes: list[ChangeRecord]
    """Keys that a later start changed, in order of their steps."""

    @property
    def comparable_passes(self) -> list[ValidRecord]:
        """Returns the passes since the last change of validation sets or loss, which are comparable with the last."""
        if not self.passes:
            return []
        last = self.passes[-1].step
        changed = [change.step for change in self.changes if change.key.startswith(("data.valid.", "loss."))]
        since = max((step for step in changed if step < last), default=-1)
        return [record for record in self.passes if record.step > since]


def load_curves(run_folder: Path) -> Curves:
    """Reads a run folder, even while the run is in progress; raises DataError if it has no record."""
    path = run_folder / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the run.dir of a run that has made at least one step")
    with disk_faults(f"read {path}"):
        records = list(read_records(path))
    if not records:
        raise DataError(f"{path} holds no record yet; wait for the first step")
    steps = {record.step: record for record in records if isinstance(record, StepRecord)}
    passes = {record.step: record for record in records if isinstance(record, ValidRecord)}
    changes = [record for record in records if isinstance(record, ChangeRecord)]
    return Curves([steps[step] for step in sorted(steps)], [passes[step] for step in sorted(passes)], changes)


class LossFigure(Figure):
    """Figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png")
        return data.getvalue()


def plot(run: str | os.PathLike[str], *others: str | os.PathLike[str]) -> LossFigure:
    """Draws training and validation loss above the gradient norm; a run has one colour in both panels.

    Args:
        run: Result of `train` or `launch`, or a run folder; the run may be in progress.
        others: More runs, to compare.

    Returns:
        matplotlib figure, which a notebook shows; `savefig` writes it to a file.

    Raises:
        DataError: A folder has no record of a step.
    """
    return loss_figure([Path(each) for each in (run, *others)])


def plot_losses(run_folders: Sequence[Path], picture: Path) -> None:
    """Writes the figure of `plot` as PNG."""
    figure = loss_figure(run_folders)
    with disk_faults(f"write {picture}"):
        picture.parent.mkdir(parents=True, exist_ok=True)
        with replacing(picture) as new:
            figure.savefig(new, format="png")


def loss_figure(run_folders: Sequence[Path]) -> LossFigure:
    runs = [load_curves(folder) for folder in run_folders]
    figure = LossFigure(figsize=(9, 7), dpi=120, layout="constrained")
    losses, norms = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, (name, run) in enumerate(zip(distinct_names(run_folders), runs, strict=True)):
        colour, updated = curve_colour(number), [record for record in run.steps if not record.empty]
        draw_curve(losses, f"{name}, train", [(record.step, record.loss) for record in updated], colour)
        draw_curve(norms, name, [(record.step, record.grad_norm) for record in updated], colour)
        if run.passes:
            passes = [(record.step, record.valid_loss) for record in run.passes]
            style = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "linestyle": "--", "zorder": 3}
            losses.plot(*zip(*passes), color=colour, label=f"{name}, validation", **style)
    finish_axes(losses, "loss (nats)", is_log=False)
    finish_axes(norms, "gradient norm", is_log=any(record.grad_norm > 0 for run in runs for record in run.steps))
    losses.legend()
    norms.set_xlabel("step")
    return figure


def running_mean(values: Sequence[float], half_window: int) -> list[float]:
    """Averages each finite value with up to `half_window` neighbours on either side."""
    raw = np.asarray(values, dtype=np.float64)
    is_number = np.isfinite(raw)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_number, raw, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_number)])
    index = np.arange(len(raw))
    first, end = np.maximum(index - half_window, 0), np.minimum(index + half_window + 1, len(raw))
    num_numbers = counts[end] - counts[first]
    means = (sums[end] - sums[first]) / np.maximum(num_numbers, 1)
    return [float(mean) for mean in np.where(num_numbers > 0, means, math.nan)]


def draw_curve(
    axes: Any, label: str, points: Sequence[tuple[int, float]], colour: str, *, dashed: bool = False
) -> None:
    """Draws one run's quantity over steps; draws a long curve in a light tone under its running mean."""
    line = "--" if dashed else "-"
    steps, values = [step for step, _ in points], [value for _, value in points]
    if len(points) <= SMOOTH_ABOVE_STEPS:
        axes.plot(steps, values, color=colour, linewidth=1.4, linestyle=line, label=label)
        return
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(steps, running_mean(values, len(points) // 100), color=colour, linewidth=1.4, linestyle=line, label=label)


def finish_axes(axes: Any, label: str, *, is_log: bool) -> None:
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if is_log:
        axes.set_yscale("log")


def distinct_names(run_folders: Iterable[Path]) -> list[str]:
    """Returns the names of the folders, or their resolved paths if two names are equal."""
    paths = [folder.resolve() for folder in run_folders]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]
