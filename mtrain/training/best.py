"""The number that decides the best checkpoints and the early end of a run (`valid.metric`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.checkpoint.store.manifest import MetricInfo
from mtrain.config.schema.train import EvalSection, ValidSection
from mtrain.report.metrics.jsonl import read_records
from mtrain.report.metrics.record import ChangeRecord, Record, TaskRecord, ValidRecord

Results = Sequence[ValidRecord | TaskRecord]


class Metric(NamedTuple):
    """A number of validation or of tasks."""

    name: str | None
    """Name of a validation set, or `task/metric`; None: the first validation set."""
    is_better_if_higher: bool = False

    @property
    def is_of_tasks(self) -> bool:
        """Whether tasks give the number, not validation."""
        return self.name is not None and "/" in self.name

    def of(self, results: Results) -> float | None:
        """Returns the value in the results after a step; None if they do not include it.

        Raises:
            ConfigError: The tasks were evaluated, but have no such metric; on all ranks.
        """
        for record in results:
            match record:
                case ValidRecord() if not self.is_of_tasks:
                    chosen = None if self.name is None else record.valid_sets.get(self.name)
                    return record.valid_loss if chosen is None else chosen.loss
                case TaskRecord() if self.is_of_tasks:
                    if (value := record.tasks.get(str(self.name))) is not None:
                        return value
                    fault = ConfigError(
                        f"valid.metric={self.name} is not a result of the tasks; choose one of "
                        f"{', '.join(record.tasks)}"
                    )
                    fault.on_every_rank = True
                    raise fault
        return None

    def info(self, value: float, section: EvalSection) -> MetricInfo:
        """Returns a value of tasks for a manifest, whose name includes the options that change the value."""
        options: dict[str, object] = {"num_fewshot": section.num_fewshot, "limit": section.limit}
        options |= {"chat": True} if section.apply_chat_template else {}
        options |= {"turns": section.fewshot_as_multiturn, "system": section.system_instruction}
        parts = [f"{name}={option}" for name, option in options.items() if option is not None]
        name = " ".join([str(self.name), *parts])
        return MetricInfo(name=name, value=value, is_better_if_higher=self.is_better_if_higher)


@dataclass
class Patience:
    """Counts the latest results of a metric that are not better than the best one."""

    metric: Metric
    section: ValidSection
    best: tuple[int, float] | None = None
    """Step and value of the best result."""
    num_waited: int = 0
    """Results since the best one."""

    @property
    def is_over(self) -> bool:
        """Whether the run ends early."""
        return self.section.patience is not None and self.num_waited >= self.section.patience

    def add(self, step: int, value: float | None) -> None:
        """Counts the result after a step; None: the step has no result."""
        if value is None:
            return
        gain = math.inf if self.best is None else value - self.best[1]
        gain = gain if self.best is None or self.metric.is_better_if_higher else -gain
        # a NaN is never better
        if gain > self.section.min_improvement and not math.isnan(value):
            self.best, self.num_waited = (step, value), 0
        else:
            self.num_waited += 1

    def read(self, path: Path) -> None:
        """Counts the results of earlier starts in a metrics file, since the last change of validation data or loss."""
        for record in read_records(path) if path.exists() else ():
            self._read(record)

    def _read(self, record: Record) -> None:
        if isinstance(record, ChangeRecord) and record.key.startswith(("data.valid.", "loss.")):
            self.best, self.num_waited = None, 0
        elif isinstance(record, ValidRecord | TaskRecord):
            self.add(record.step, self.metric.of([record]))

    def __str__(self) -> str:
        name = "the validation loss" if self.metric.name is None else self.metric.name
        step, value = (0, 0.0) if self.best is None else self.best
        return (
            f"{name} has not improved on the {value:.6g} of step {step} in {counted(self.num_waited, 'result')} "
            f"(valid.patience={self.section.patience})"
        )
