"""Errors that a user can meet, one class for each exit code.

A message says what was given, what is needed and what to change. `cli` prints it once, without a traceback, and exits
with `exit_code`.
"""

from typing import Any


class MtrainError(Exception):
    """A fault that the user can act on."""

    exit_code = 1
    on_every_rank = False
    """Whether rank 0 raises this error as well and alone shows it; may be set on an instance."""
    is_shown_elsewhere = False
    """Whether another rank of the launch shows this instance, so this rank stays silent."""


class ConfigError(MtrainError):
    """The configuration is wrong; found before a rank starts."""

    exit_code = 2
    on_every_rank = True


class DataError(MtrainError):
    """A corpus, tokenizer or checkpoint is missing, damaged or does not fit the configuration."""

    exit_code = 3


class NothingToLearnError(DataError):
    """No training sample has a token in the loss, so no step would change the model."""


class NumericError(MtrainError):
    """Training stopped because a number can no longer be trusted (non-finite loss, wrong denominator)."""

    exit_code = 4
    on_every_rank = True


class BadStepError(NumericError):
    """The gradient of a step must not be applied; weights and optimizer state are as before the step.

    Raised on all ranks, so train.on_nonfinite and train.on_spike decide alike.
    """

    totals: Any = None
    """`StepTotals` of the step; None before they are summed."""


class NonFiniteError(BadStepError):
    """A loss or the gradient is nan or inf, or leaves the range of float32."""


class SpoiledStateError(NonFiniteError):
    """Weights or optimizer state are not finite, so another batch would not help."""


class SpikeError(BadStepError):
    """A loss or the gradient norm lies far above those of earlier steps (train.on_spike)."""


class StopRequestedError(MtrainError):
    """A stop signal has ended work that a later start continues.

    The command writes the marker REQUEUE and exits with 0; a program that called the trainer gets this error or
    KeyboardInterrupt.
    """


class RankLostError(MtrainError):
    """A rank died or no longer answers."""

    exit_code = 5


class RunFolderError(MtrainError):
    """Another process uses the run folder, or it holds a run of another configuration."""

    exit_code = 6
    on_every_rank = True


class MachineError(MtrainError):
    """The machine's disk, permissions, limits or devices do not allow the run."""

    exit_code = 7


class UnfinishedError(MtrainError):
    """A check could not finish and proves nothing: a rank died, or the program has a fault."""

    exit_code = 8


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure in one line, with the type of an unforeseen error."""
    lines = str(error).strip().splitlines()
    if isinstance(error, MtrainError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])
