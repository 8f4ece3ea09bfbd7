"""Detection of bad steps, from numbers that are the same on all ranks, so that all ranks decide alike.

Loss and gradient norm are sums over the whole global batch, and every checkpoint has the window that a step is compared
with. So decisions depend neither on the layout nor on where a run was stopped, except for rounding.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from mtrain.base.errors import BadStepError, NonFiniteError, NumericError, SpikeError, SpoiledStateError
from mtrain.checkpoint.store.manifest import BadStepHistory, RecentUpdates, SkippedInfo
from mtrain.config.schema.train import BadStepAction, TrainSection

BUDGET_STEPS = 1000
"""Number of latest steps in which train.max_bad_steps is counted."""
_OF_NORMAL = 1.4826
"""Ratio of the standard deviation to the median distance from the median, for a normal distribution."""
_SMALLEST_SPREAD = 0.01
"""Smallest spread as a share of the median: otherwise any change of nearly constant losses would be a spike."""


class Verdict(enum.Enum):
    """Treatment of a bad step after which the run goes on."""

    SKIP = enum.auto()
    ROLL_BACK = enum.auto()


class Guard:
    """Judges steps, and remembers which were left out."""

    def __init__(self, train: TrainSection, history: BadStepHistory) -> None:
        """Begins with the history of a checkpoint."""
        self._train = train
        self._skipped = {each.step: each for each in history.skipped}
        self._refused = {each.step for each in history.skipped if not each.is_margin}
        window = 0 if train.on_spike is None else train.on_spike.window_steps
        recent = history.recent or RecentUpdates()
        self._losses = deque(recent.losses, maxlen=window)
        self._grad_norms = deque(recent.grad_norms, maxlen=window)

    @property
    def history(self) -> BadStepHistory:
        """Returns the history for the next checkpoint."""
        skipped = tuple(self._skipped[step] for step in sorted(self._skipped))
        if self._train.on_spike is None:
            return BadStepHistory(skipped)
        return BadStepHistory(skipped, RecentUpdates(losses=tuple(self._losses), grad_norms=tuple(self._grad_norms)))

    @property
    def may_go_on(self) -> bool:
        """Says whether the run can survive some bad step, for which the state before a step has to be kept."""
        spike = self._train.on_spike
        return self._train.on_nonfinite != "stop" or (spike is not None and spike.action != "stop")

    def left_out(self, step: int) -> str | None:
        """Says why the batch of a step, counted from 1, is not computed; None if it is."""
        known = self._skipped.get(step)
        return None if known is None else known.reason

    def updates_before(self, step: int) -> int:
        """Counts the earlier steps that were not left out; the learning rate follows this number."""
        return step - 1 - sum(each < step for each in self._skipped)

    def judge(self, loss: float, grad_norm: float) -> None:
        """Refuses a spike; must be called before the gradient is applied.

        Args:
            loss: Mean of the main term over the global batch.

        Raises:
            SpikeError: The loss or the gradient norm is far above those of the window.
        """
        spike = self._train.on_spike
        if spike is None or len(self._losses) < spike.window_steps:
            return
        seen = (
            ("loss", loss, self._losses, spike.loss_deviations),
            ("gradient norm", grad_norm, self._grad_norms, spike.grad_norm_deviations),
        )
        for name, value, window, deviations in seen:
            if deviations is not None and value > (limit := highest(window, deviations)):
                raise SpikeError(
                    f"the {name} is {value:.6g}, above {limit:.6g}: the median of the {len(window)} updates before is "
                    f"{median(window):.6g} (train.on_spike)"
                )

    def accept(self, loss: float, grad_norm: float) -> None:
        """Adds a step whose gradient was applied to the window."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)

    def refuse(self, step: int, fault: BadStepError) -> Verdict:
        """Decides what to do about a bad step, and notes which batches are left out.

        A spoiled state is not the fault of the batch: a rollback repeats the step, once, and skipping repairs nothing.

        Raises:
            NumericError: The run ends.
        """
        action = self._action(fault)
        is_spoiled = isinstance(fault, SpoiledStateError)
        if action == "stop" or (action == "skip" and is_spoiled):
            raise fault
        reason = str(fault)
        if step in self._refused:
            raise NumericError(f"{reason}, a second time at this step; the run is not repeated for ever")
        self._refused.add(step)
        if not is_spoiled:
            self._leave_out(step, reason, action)
        bad = [each for each in self._refused if each > step - BUDGET_STEPS]
        if len(bad) > self._train.max_bad_steps:
            raise NumericError(
                f"{reason}; {len(bad)} of the latest {BUDGET_STEPS} steps were bad, more than train.max_bad_steps="
                f"{self._train.max_bad_steps}. Lower optimizer.lr, look at the data, or raise train.max_bad_steps"
            )
        return Verdict.SKIP if action == "skip" else Verdict.ROLL_BACK

    def _leave_out(self, step: int, reason: str, action: BadStepAction) -> None:
        margin = self._train.rollback_margin_steps if action == "rollback" else 0
        for each in range(max(1, step - margin), step + margin + 1):
            near = SkippedInfo(step=each, reason=f"near step {step}: {reason}", is_margin=True)
            self._skipped.setdefault(each, near)
        self._skipped[step] = SkippedInfo(step=step, reason=reason)

    def first_left_out_for(self, step: int) -> int:
        """Returns the first step that a rollback because of `step` leaves out; the checkpoint must be older."""
        return max(1, step - self._train.rollback_margin_steps)

    def rewind(self, history: BadStepHistory) -> None:
        """Takes over the history of a checkpoint; batches found bad since then are still left out."""
        self._skipped = {each.step: each for each in history.skipped} | self._skipped
        recent = history.recent or RecentUpdates()
        for window, values in ((self._losses, recent.losses), (self._grad_norms, recent.grad_norms)):
            window.clear()
            window.extend(values)

    def _action(self, fault: BadStepError) -> BadStepAction:
        if isinstance(fault, SpikeError):
            assert self._train.on_spike is not None, "nobody else judges"
            return self._train.on_spike.action
        assert isinstance(fault, NonFiniteError), fault
        return self._train.on_nonfinite


def highest(window: Sequence[float] | deque[float], deviations: float) -> float:
    """Returns the largest value that is not a spike: median + deviations x spread (`SpikeSection`)."""
    middle = median(window)
    distance = median(abs(value - middle) for value in window)
    return middle + deviations * max(_OF_NORMAL * distance, _SMALLEST_SPREAD * abs(middle))
