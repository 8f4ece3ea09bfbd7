"""Errors that a user can meet, one class for each exit code.

A message says what was given, what is needed and what to change. `cli` prints it without a traceback, once, and
leaves with `exit_code`.
"""

from typing import Any


class MtrainError(Exception):
    """A fault that the user can act on."""

    exit_code = 1
    on_every_rank = False
    """Whether rank 0 raises this error too, so that it alone shows it; may be set on a single instance."""
    is_shown_elsewhere = False
    """Whether another rank of the same launch shows this instance, so that this rank is silent."""


class ConfigError(MtrainError):
    """The configuration is wrong; found before a rank starts."""

    exit_code = 2
    on_every_rank = True


class DataError(MtrainError):
    """A corpus, a tokenizer or a checkpoint is missing, damaged or does not fit the configuration."""

    exit_code = 3


class NothingToLearnError(DataError):
    """No training sample has a token that the loss counts, so that no step would change the model."""


class NumericError(MtrainError):
    """Training stopped because a number can no longer be trusted (non-finite loss, wrong denominator)."""

    exit_code = 4
    on_every_rank = True


class BadStepError(NumericError):
    """The gradient of a step must not be applied; weights and optimizer state are as they were before the step.

    Raised on all ranks alike, so that train.on_nonfinite and train.on_spike decide alike.
    """

    totals: Any = None
    """`StepTotals` of the step; None where they had not been summed up."""


class NonFiniteError(BadStepError):
    """A loss or the gradient is nan or inf, or leaves the range of float32."""


class SpoiledStateError(NonFiniteError):
    """Weights or optimizer state are not finite, so that no other batch can do better."""


class SpikeError(BadStepError):
    """A loss or the gradient's norm lies far above those of the steps before (train.on_spike)."""


class StopRequestedError(MtrainError):
    """A stop signal has ended work that a later start goes on with.

    The command leaves the marker REQUEUE and ends with 0; a program that has called the trainer gets this error, or
    KeyboardInterrupt."""


class RankLostError(MtrainError):
    """A rank died or no longer answers."""

    exit_code = 5


class RunFolderError(MtrainError):
    """Another process uses the run folder, or it holds a run of another configuration."""

    exit_code = 6
    on_every_rank = True


class MachineError(MtrainError):
    """Disk, permissions, limits or devices of this machine do not allow the run."""

    exit_code = 7


class UnfinishedError(MtrainError):
    """A check could not be finished and says nothing: a rank of it died, or the program itself has a fault."""

    exit_code = 8


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure in one line, with the kind of an error that nobody foresaw."""
    lines = str(error).strip().splitlines()
    if isinstance(error, MtrainError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])
