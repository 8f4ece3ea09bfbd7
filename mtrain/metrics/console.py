"""What a person watching the run sees: a progress bar on a terminal, one plain line a step in a job log."""

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from mtrain.metrics.record import MAIN_TERM, ChangeRecord, Record, StepRecord, ValidRecord

ETA_WINDOW_STEPS = 50
"""The remaining time follows from the pace of so many steps, validation and saving between them included."""

_LAYOUT_DEPENDENT = "(of this layout only)"


class ConsoleSink:
    """Shows steps with loss, gradient norm, tokens per second and remaining time."""

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
            num_steps: Steps of the whole run.
            resume_step: Steps already done.
            interval_steps: Plain lines come at multiples of this and at the last step; the bar moves at every step.
            console: Where to write; standard output by default. The bar is drawn where it is a terminal.
            clock: Seconds from any origin, never going back.
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
                parts += [*_side_terms(record), f"samples {record.samples}", f"{record.seconds:.1f} s"]
                self._print("  ".join(parts + [_LAYOUT_DEPENDENT] * record.layout_dependent))
            case ChangeRecord():
                self._print(f"step {record.step}/{self._num_steps}  from here on {record}")

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
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
        text = f"{_numbers(record)}  eta {eta}"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, description=text)
        elif record.step % self._interval_steps == 0 or record.step == self._num_steps:
            self._print(f"step {record.step}/{self._num_steps}  {text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Pace:
    """How fast steps go by, from the moments of the last ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Remembers nothing yet; `clock` gives seconds."""
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW_STEPS + 1)

    def mark(self, step: int) -> None:
        """`step` steps are done now."""
        self._marks.append((step, self._clock()))

    def remaining_s(self, num_steps: int) -> float | None:
        """Seconds until `num_steps` steps are done; None before the first step."""
        (first_step, first_time), (last_step, last_time) = self._marks[0], self._marks[-1]
        if last_step == first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * (num_steps - last_step)


def as_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as 1:02:03."""
    if seconds is None:
        return "-:--:--"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def _numbers(record: StepRecord) -> str:
    parts = [
        "loss -" if record.empty else f"loss {record.loss:.4f}",
        *_side_terms(record),
        f"grad_norm {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        f"{record.tokens_per_second:,.0f} tokens/s",
    ]
    if record.loss_tokens is not None and record.loss_tokens != record.tokens and record.tokens:
        parts.append(f"in the loss {record.loss_tokens / record.tokens:.1%}")
    if record.padding_tokens:
        parts.append(f"padding {record.padding_tokens / (record.tokens + record.padding_tokens):.1%}")
    if record.mfu is not None:
        parts.append(f"mfu {record.mfu:.1%}")
    if record.empty:
        parts.append("empty batch")
    if record.skipped is not None:
        parts.append(f"skipped: {record.skipped}")
    if record.layout_dependent:
        parts.append(_LAYOUT_DEPENDENT)
    return "  ".join(parts)


def _side_terms(record: StepRecord | ValidRecord) -> list[str]:
    """The means of all terms but the main one, without coefficients."""
    return [
        f"{name} {term.loss:.4g}" if term.denominator else f"{name} -"
        for name, term in record.terms.items()
        if name != MAIN_TERM
    ]
