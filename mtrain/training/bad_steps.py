"""Detects bad steps before they are applied, and skips them or rolls back to a good checkpoint.

Loss and gradient norm are sums over the whole global batch, the same on all ranks, and every checkpoint has the window
that a step is compared with. So all ranks decide alike, and decisions depend neither on the layout nor on where a run
was stopped, except for rounding.
"""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal, NamedTuple

from torch import Tensor

from mtrain.base.errors import BadStepError, DataError, NonFiniteError, NumericError, SpikeError, SpoiledStateError
from mtrain.base.heartbeat import Heartbeat, Phase
from mtrain.base.spelling import counted
from mtrain.checkpoint.state.save import Saver
from mtrain.checkpoint.store.directory import delete_checkpoint, set_aside
from mtrain.checkpoint.store.manifest import BadStepHistory, RecentUpdates, SkippedInfo
from mtrain.config.schema.train import TrainSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import StepTotals
from mtrain.core.engine.non_finite import cause_of_non_finite
from mtrain.core.engine.optimizer import Update
from mtrain.core.ranks import rng
from mtrain.core.ranks.init import on_first_rank
from mtrain.core.state.loss_scaler import LossScaler
from mtrain.runs.folder import RunFolder
from mtrain.training.build import Run
from mtrain.training.export import Exporter
from mtrain.training.resume import load_newest

_log = logging.getLogger(__name__)

BUDGET_STEPS = 1000
"""Number of latest steps to which train.max_bad_steps applies."""
_OF_NORMAL = 1.4826
"""Ratio of the standard deviation to the median distance from the median, for a normal distribution."""
_SMALLEST_SPREAD = 0.01
"""Smallest spread as a share of the median; without it, any change of nearly constant losses would be a spike."""


class Guard:
    """Judges steps, and remembers which were left out."""

    def __init__(self, train: TrainSection, history: BadStepHistory) -> None:
        self._train = train
        self._skipped: dict[int, SkippedInfo] = {}
        self._refused = {info.step for info in history.skipped if not info.is_margin}
        window = 0 if train.on_spike is None else train.on_spike.window_steps
        self._losses, self._grad_norms = deque[float](maxlen=window), deque[float](maxlen=window)
        self.rewind(history)

    @property
    def history(self) -> BadStepHistory:
        recent = RecentUpdates(losses=tuple(self._losses), grad_norms=tuple(self._grad_norms))
        skipped = tuple(self._skipped[step] for step in sorted(self._skipped))
        return BadStepHistory(skipped, None if self._train.on_spike is None else recent)

    @property
    def may_go_on(self) -> bool:
        """Says whether the run can survive a bad step, which requires a copy of the state before each step."""
        spike = self._train.on_spike
        return self._train.on_nonfinite != "stop" or (spike is not None and spike.action != "stop")

    def left_out(self, step: int) -> str | None:
        """Returns why the batch of a step, counted from 1, is left out; None if it is computed."""
        known = self._skipped.get(step)
        return None if known is None else known.reason

    def updates_before(self, step: int) -> int:
        """Counts the earlier steps that were not left out; the learning rate follows this number."""
        return step - 1 - sum(skipped < step for skipped in self._skipped)

    def judge(self, loss: float, grad_norm: float) -> None:
        """Raises SpikeError if loss or gradient norm is far above those of the window; called before the update."""
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
                    f"the {name} is {value:.6g}, above {limit:.6g}: the median of the previous "
                    f"{counted(len(window), 'update')} is {median(window):.6g} (train.on_spike)"
                )

    def accept(self, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._losses.append(loss)
            self._grad_norms.append(grad_norm)

    def refuse(self, step: int, fault: BadStepError) -> Literal["skip", "rollback"]:
        """Decides how the run continues after a bad step, and records the left-out batches; raises if the run ends.

        A spoiled state is not the batch's fault, so a rollback repeats the step, once; skipping it would not help.
        """
        spike = self._train.on_spike
        action = spike.action if spike is not None and isinstance(fault, SpikeError) else self._train.on_nonfinite
        is_spoiled = isinstance(fault, SpoiledStateError)
        if action == "stop" or (action == "skip" and is_spoiled):
            raise fault
        reason = str(fault)
        if step in self._refused:
            raise NumericError(f"{reason}, a second time at this step; it is not tried again")
        self._refused.add(step)
        if not is_spoiled:
            margin = self._train.rollback_margin_steps if action == "rollback" else 0
            for number in range(max(1, step - margin), step + margin + 1):
                near = SkippedInfo(step=number, reason=f"near step {step}: {reason}", is_margin=True)
                self._skipped.setdefault(number, near)
            self._skipped[step] = SkippedInfo(step=step, reason=reason)
        bad = [number for number in self._refused if number > step - BUDGET_STEPS]
        if len(bad) > self._train.max_bad_steps:
            raise NumericError(
                f"{reason}; {len(bad)} of the latest {BUDGET_STEPS} steps were bad, more than train.max_bad_steps="
                f"{self._train.max_bad_steps}. Lower optimizer.lr, look at the data, or raise train.max_bad_steps"
            )
        return action

    def first_left_out_for(self, step: int) -> int:
        """Returns the first step that a rollback from `step` leaves out; the checkpoint must be older."""
        return max(1, step - self._train.rollback_margin_steps)

    def rewind(self, history: BadStepHistory) -> None:
        """Restores the history of a checkpoint; batches found bad since then are still left out."""
        self._skipped = {info.step: info for info in history.skipped} | self._skipped
        recent = history.recent or RecentUpdates()
        for window, values in ((self._losses, recent.losses), (self._grad_norms, recent.grad_norms)):
            window.clear()
            window.extend(values)


def highest(window: Sequence[float], deviations: float) -> float:
    """Returns the largest value that is not a spike: median + deviations x spread (`SpikeSection`)."""
    middle = median(window)
    distance = median(abs(value - middle) for value in window)
    return middle + deviations * max(_OF_NORMAL * distance, _SMALLEST_SPREAD * abs(middle))


class StepOutcome(NamedTuple):
    """Outcome of a step."""

    totals: StepTotals | None
    """Totals of the step; None if it was not computed completely."""
    update: Update | None
    """Update of the optimizer; None if nothing was applied."""
    refused: str | None = None
    """Reason why the batch was left out, if it was."""

    @property
    def is_applied(self) -> bool:
        return self.update is not None and not self.update.overflowed

    @property
    def has_learned(self) -> bool:
        return self.totals is not None and not self.totals.is_empty and self.refused is None

    @property
    def stop_requested(self) -> bool:
        """Says whether any rank asked to stop; if nothing was computed, the next step reports it."""
        return self.totals is not None and self.totals.stop_requested


class RollBackError(NumericError):
    """Request to continue from an earlier checkpoint, raised on all ranks; it never leaves the trainer."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step
        """Bad step, counted from 1, or the last step before the state was found to be spoiled."""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Prefixes messages of numeric errors inside the block with `what`, such as the step."""
    try:
        yield
    except BadStepError as error:
        reported = type(error)(f"{what}: {error}")
        reported.totals = error.totals
        raise reported from error
    except NumericError as error:
        raise NumericError(f"{what}: {error}") from error


class StepTrial:
    """Makes the steps of a run, and undoes bad ones."""

    def __init__(self, run: Run, guard: Guard, heartbeat: Heartbeat) -> None:
        self._run, self._guard, self._heartbeat = run, guard, heartbeat
        self._draws = bool(run.model.config.dropout_keys)

    def make(
        self, microbatches: Sequence[Microbatch] | None, lr: float, step: int, asked_to_stop: Callable[[], bool]
    ) -> StepOutcome:
        """Computes and applies a step. Collective over the world.

        A bad step that is skipped leaves weights, optimizer state with its counters, loss scale and random states
        unchanged, bit for bit.

        Args:
            microbatches: Microbatches of this data-parallel rank; see `TrainingStep.forward_backward`.
            asked_to_stop: Says whether this rank has received a stop signal; called when the step begins.

        Raises:
            RollBackError: The step was bad, and train.on_nonfinite or train.on_spike is rollback.
            NumericError: The step was bad, and the run ends.
        """
        if (reason := self._guard.left_out(step)) is not None:
            return StepOutcome(None, None, f"left out: {reason}")
        before = self._before()
        totals = None
        try:
            with named(f"step {step}"):
                self._heartbeat.enter(Phase.FORWARD_BACKWARD, step)
                totals = self._run.training.forward_backward(microbatches, stop_requested=asked_to_stop())
                self._heartbeat.enter(Phase.UPDATE, step)
                loss = totals.loss
                update = self._run.training.update(totals, lr, lambda grad_norm: self._guard.judge(loss, grad_norm))
        except BadStepError as fault:
            reported = self._with_cause(fault)
            if self._guard.refuse(step, reported) == "rollback":
                raise RollBackError(step, str(reported)) from fault
            self._restore(before)
            if self._run.model.groups.rank == 0:
                _log.warning(f"warning: {reported}; the step is left out")
            return StepOutcome(fault.totals if totals is None else totals, None, str(reported))
        if update is not None and not update.overflowed:
            self._guard.accept(totals.loss, update.grad_norm)
        return StepOutcome(totals, update)

    def _with_cause(self, fault: BadStepError) -> BadStepError:
        if not isinstance(fault, NonFiniteError):
            return fault
        run = self._run
        cause = cause_of_non_finite(run.model, run.training.largest_gradients)
        kind = SpoiledStateError if cause.is_state else NonFiniteError
        return kind(f"{fault} ({cause.text})" if cause.text else str(fault))

    def _before(self) -> tuple[dict[str, Tensor], LossScaler | None] | None:
        """Returns copies of the states that a step changes before it is judged; None if a bad step ends the run."""
        if not self._guard.may_go_on:
            return None
        states = rng.random_states(self._run.model.groups) if self._draws else {}
        return states, self._run.model.optimizer.state.loss_scaler()

    def _restore(self, before: tuple[dict[str, Tensor], LossScaler | None] | None) -> None:
        assert before is not None, "a guard skips steps only if `may_go_on`"
        states, scaler = before
        if states:
            rng.set_random_states(states)
        if scaler is not None:
            self._run.model.optimizer.state.set_loss_scaler(scaler)


def roll_back(
    run: Run, folder: RunFolder, saver: Saver, exporter: Exporter, guard: Guard, request: RollBackError
) -> Run:
    """Loads the newest good checkpoint before the bad step of `request`. Collective over the world.

    Later checkpoints and exports are deleted: their steps will be made again, without the bad batch.

    Raises:
        NumericError: No such checkpoint exists.
    """
    if run.model.groups.rank == 0:
        _log.info(f"rolling back: {request}")
    below = guard.first_left_out_for(request.step)
    too_new = saver.doubtful(below)

    def remove() -> None:
        for step in too_new:
            if not delete_checkpoint(folder.checkpoints, step):
                set_aside(folder.checkpoints, step)  # another process is reading it

    try:
        start = load_newest(run.model, folder, run.loader, run.inputs, passed_over=too_new)
    except DataError as error:
        raise NumericError(f"{request}; there is no checkpoint to roll back to: {error}") from error
    if start is None:
        raise NumericError(
            f"{request}; there is no checkpoint of a step before {below} to roll back to: set checkpoint.interval_steps"
        )
    on_first_rank(remove)
    saver.rewind(start.step, start.changes)
    exporter.rewind(start.step)
    guard.rewind(start.history)
    return replace(run, start_step=start.step, tokens=start.tokens, changes=start.changes, history=guard.history)
