"""Errors for users, one class per exit code.

A message says what was given, what is needed and what to change. The command line prints it once, without a traceback,
and exits with `exit_code`.
"""

import os
import re
from typing import Any

SITE = "MTRAIN_DOCS"
"""Environment variable with the address of the documentation site, for installations without the files."""

_PAGE = re.compile(r"\bdocs/([\w./-]+)\.md\b")


def with_addresses(text: str, address: str | None = None) -> str:
    """Replaces paths of the documentation, such as docs/index.md, by addresses of the site, if it has an address.

    Args:
        address: Address of the site; None: that in `SITE`.
    """
    address = os.environ.get(SITE, "").rstrip("/") if address is None else address
    return _PAGE.sub(lambda page: f"{address}/{page[1]}.html", text) if address else text


class MtrainError(Exception):
    """A fault that the user can act on."""

    exit_code = 1
    on_every_rank = False
    """Whether rank 0 also raises this error and is the only rank to show it; may be set on an instance."""
    is_shown_elsewhere = False
    """Whether another rank shows this instance, so this rank stays silent."""

    def __str__(self) -> str:
        return with_addresses(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class ConfigError(MtrainError):
    """The configuration is wrong; found before a rank starts."""

    exit_code = 2
    on_every_rank = True


class DataError(MtrainError):
    """A corpus, tokenizer or checkpoint is missing, damaged or does not fit the configuration."""

    exit_code = 3


class NothingToLearnError(DataError):
    """No training sample has a token in the loss, so training would not change the model."""


class NumericError(MtrainError):
    """Training stopped because a number cannot be trusted (non-finite loss, wrong denominator)."""

    exit_code = 4
    on_every_rank = True


class BadStepError(NumericError):
    """The gradient of a step must not be applied; weights and optimizer state are those before the step.

    All ranks raise it, so that all react alike to train.on_nonfinite and train.on_spike.
    """

    totals: Any = None
    """`StepTotals` of the step; None before they are summed."""


class NonFiniteError(BadStepError):
    """A loss or the gradient is nan, inf or beyond float32."""


class SpoiledStateError(NonFiniteError):
    """Weights or optimizer state are not finite, so another batch would not help."""


class SpikeError(BadStepError):
    """A loss or the gradient norm is far above those of earlier steps (train.on_spike)."""


class StopRequestedError(MtrainError):
    """A stop signal ended work that a later start continues.

    The command line writes the marker REQUEUE and exits with 0; a program that calls the trainer gets this error or
    KeyboardInterrupt.
    """


class RankLostError(MtrainError):
    """A rank died or does not answer."""

    exit_code = 5


class RunFolderError(MtrainError):
    """The run folder is in use by another process, or belongs to a run with another configuration."""

    exit_code = 6
    on_every_rank = True


class MachineError(MtrainError):
    """The machine's disk, permissions, limits or devices do not allow the run."""

    exit_code = 7


class UnfinishedError(MtrainError):
    """A check did not finish and proves nothing: a rank died, or the program has a fault."""

    exit_code = 8


def reason_of(error: BaseException) -> str:
    """Returns the reason for a failure in one line; for unforeseen errors, with their type."""
    lines = str(error).strip().splitlines()
    if isinstance(error, MtrainError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])
