"""Console display of a run: a progress bar on a terminal, one plain line per step in a job log."""

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from mtrain.metrics.record import ChangeRecord, Record, StepRecord, ValidRecord
from mtrain.metrics.shown import LAYOUT_DEPENDENT, as_duration, as_line, side_terms, step_numbers

ETA_WINDOW_STEPS = 50
"""Number of steps whose pace predicts the remaining time; includes validation and saving between them."""


class ConsoleSink:
    """Sink that shows steps with loss, gradient norm, tokens per second and remaining time."""

    def __init__(
        self,
        num_steps: int,
        resume_step: int = 0,
        *,
        interval_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the display.

        Args:
            num_steps: Number of steps of the whole run.
            resume_step: Number of steps already done.
            interval_steps: Interval of plain lines, which also appear at the last step; the bar moves at every step.
            console: Console to write to; standard output by default. The bar is drawn where it is a terminal.
            clock: Function that returns seconds from any origin and never goes back.
        """
        self._num_steps = num_steps
        self._interval_steps = interval_steps
        self._console = Console() if console is None else console
        self._pace = Pace(clock)
        self._pace.mark(resume_step)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal:
            self._start_bar(resume_step)

    def write(self, record: Record) -> None:
        """Shows the record."""
        match record:
            case StepRecord():
                self._pace.mark(record.step)
                self._show_step(record, as_duration(self._pace.remaining_s(self._num_steps)))
            case ValidRecord():
                parts = [f"step {record.step}/{self._num_steps}", f"valid_loss {record.valid_loss:.4f}"]
                parts += [f"{name} {each.loss:.4f}" for name, each in record.valid_sets.items()]
                shown = as_line(side_terms(record) | {"samples": str(record.samples)})
                parts += [shown, f"{record.seconds:.1f} s", *[LAYOUT_DEPENDENT] * record.layout_dependent]
                self._print("  ".join(parts))
            case ChangeRecord():
                self._print(f"step {record.step}/{self._num_steps}  from here on {record}")

    def close(self) -> None:
        """Leaves the bar as it is and releases the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self, resume_step: int) -> None:
        columns = (
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=self._num_steps, completed=resume_step)
        self._bar.start()

    def _show_step(self, record: StepRecord, eta: str) -> None:
        remarks = ["empty batch"] * record.empty
        remarks += [] if record.skipped is None else [f"skipped: {record.skipped}"]
        remarks += [LAYOUT_DEPENDENT] * record.layout_dependent
        text = "  ".join([as_line(step_numbers(record)), *remarks, f"eta {eta}"])
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=text)
        elif record.step % self._interval_steps == 0 or record.step == self._num_steps:
            self._print(f"step {record.step}/{self._num_steps}  {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Pace:
    """Speed of the run, from the times of its last steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts without any step; `clock` returns seconds."""
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    def mark(self, step: int) -> None:
        """Notes that `step` steps are done now."""
        self._marks.append((step, self._clock()))

    def remaining_s(self, num_steps: int) -> float | None:
        """Predicts the seconds until `num_steps` steps are done; None before the first step."""
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * (num_steps - last_step)
