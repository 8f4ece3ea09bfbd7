"""One step of the loop: applied, left out, or rolled back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from mtrain.base.errors import BadStepError, NonFiniteError, NumericError, SpoiledStateError
from mtrain.base.heartbeat import Heartbeat, Phase
from mtrain.core.batch.batch import Microbatch
from mtrain.core.engine.loss_reduction import StepTotals
from mtrain.core.engine.non_finite import cause_of_non_finite
from mtrain.core.engine.optimizer import Update
from mtrain.core.ranks import rng
from mtrain.core.state.loss_scaler import LossScaler
from mtrain.training.build import Run
from mtrain.training.faults.guard import Guard, Verdict

_log = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """Outcome of a step."""

    totals: StepTotals | None
    """Totals of the step; None if nothing was computed, or not to the end."""
    update: Update | None
    """Update of the optimizer; None if nothing was applied."""
    refused: str | None = None
    """Reason why the batch was left out, if it was."""

    @property
    def is_applied(self) -> bool:
        """Says whether weights were updated."""
        return self.update is not None and not self.update.overflowed

    @property
    def has_learned(self) -> bool:
        """Says whether the batch had loss tokens and was not refused."""
        return self.totals is not None and not self.totals.is_empty and self.refused is None

    @property
    def stop_requested(self) -> bool:
        """Says whether any rank asked to stop; if nothing was computed, the next step will say so."""
        return self.totals is not None and self.totals.stop_requested


class RollBackError(NumericError):
    """Request to go on from an earlier checkpoint, raised on all ranks; it never leaves the trainer."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step
        """Step that was bad, counted from 1, or the last step before the state was found to be spoiled."""


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Adds the place to the message of a numeric error that is raised inside the block."""
    try:
        yield
    except BadStepError as error:
        reported = type(error)(f"{what}: {error}")
        reported.totals = error.totals
        raise reported from error
    except NumericError as error:
        raise NumericError(f"{what}: {error}") from error


class StepTrial:
    """Makes the steps of a run, and undoes what a bad one has touched."""

    def __init__(self, run: Run, guard: Guard, heartbeat: Heartbeat) -> None:
        """Keeps the parts that a step needs."""
        self._run, self._guard, self._heartbeat = run, guard, heartbeat
        self._draws = bool(run.model.config.dropout_keys)

    def make(
        self, own: Sequence[Microbatch] | None, lr: float, step: int, asked_to_stop: Callable[[], bool]
    ) -> StepOutcome:
        """Computes and applies a step. Collective over the world.

        A bad step that is skipped leaves weights, optimizer state with its counters, loss scale and random states
        unchanged, bit for bit.

        Args:
            own: Microbatches of this data-parallel rank; see `TrainingStep.forward_backward`.
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
                totals = self._run.training.forward_backward(own, stop_requested=asked_to_stop())
                self._heartbeat.enter(Phase.UPDATE, step)
                loss = totals.loss
                update = self._run.training.update(totals, lr, lambda grad_norm: self._guard.judge(loss, grad_norm))
        except BadStepError as fault:
            reported = self._with_cause(fault)
            if self._guard.refuse(step, reported) is Verdict.ROLL_BACK:
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
        cause = cause_of_non_finite(run.model, run.training.local_gradients)
        kind = SpoiledStateError if cause.is_state else NonFiniteError
        return kind(f"{fault} ({cause.text})" if cause.text else str(fault))

    def _before(self) -> tuple[dict[str, Tensor], LossScaler | None] | None:
        """Returns copies of what a step changes before it is judged; None if the run ends at a bad step anyway."""
        if not self._guard.may_go_on:
            return None
        states = rng.random_states(self._run.model.groups) if self._draws else {}
        return states, self._run.model.optimizer.state.loss_scaler()

    def _restore(self, before: tuple[dict[str, Tensor], LossScaler | None] | None) -> None:
        assert before is not None, "only a guard that goes on skips"
        states, scaler = before
        if states:
            rng.set_random_states(states)
        if scaler is not None:
            self._run.model.optimizer.state.set_loss_scaler(scaler)
