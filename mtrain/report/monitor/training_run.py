"""The run that `mtrain.train` and `mtrain.launch` return."""

import os
from dataclasses import dataclass
from pathlib import Path

from mtrain.base.notebook import html_table
from mtrain.checkpoint.store.steps import step_name
from mtrain.report.metrics.shown import as_line, step_numbers
from mtrain.report.monitor.status import RunState, RunStatus, is_run_folder, read_status
from mtrain.runs.folder import RunFolder


@dataclass(frozen=True)
class TrainingRun(os.PathLike[str]):
    """Path of a run folder, with the state of its run; every function that takes the path of a run accepts it."""

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def status(self) -> RunStatus:
        """State, latest step and validation, newest checkpoint and alarms, read from the folder at each access."""
        return read_status(self.folder)

    @property
    def is_complete(self) -> bool:
        """Whether the run has made all its steps."""
        return is_run_folder(self.folder) and self.status.standing.state is RunState.FINISHED

    @property
    def checkpoint(self) -> Path | None:
        """Newest checkpoint; None if the run has none."""
        step = self.status.last_checkpoint
        return None if step is None else RunFolder(self.folder).checkpoints / step_name(step)

    def __repr__(self) -> str:
        return "; ".join(f"{name} {value}" for name, value in self._lines().items())

    def _repr_html_(self) -> str:
        return html_table(self._lines().items())

    def _lines(self) -> dict[str, str]:
        if not is_run_folder(self.folder):  # stopped before it began
            return {"run": str(self.folder), "state": str(RunState.UNKNOWN)}
        status = self.status
        lines = {"run": str(self.folder), "state": str(status.standing)}
        lines["step"] = f"{status.step} of {'?' if status.num_steps is None else status.num_steps}"
        if status.last is not None:
            lines["last step"] = as_line(step_numbers(status.last))
        if status.last_pass is not None:
            lines["validation"] = f"valid_loss {status.last_pass.valid_loss:.4f} after step {status.last_pass.step}"
        lines["checkpoint"] = "none" if status.last_checkpoint is None else step_name(status.last_checkpoint)
        return lines
