"""What every rank does in a test of numeric faults: the real trainer, to its end or to its error."""

from __future__ import annotations

import contextlib
import io
import os
from typing import NamedTuple

from mtrain import faultpoints
from mtrain.config import Config
from mtrain.errors import MtrainError
from mtrain.health.signals import StopSignal
from mtrain.mcore.groups import Groups
from mtrain.trainer import train_on


class Ending(NamedTuple):
    """How a start of a run ended on this rank."""

    exit_code: int
    message: str
    """Of the error; empty where there was none."""
    output: str
    """What this rank printed."""


def run(groups: Groups, config: Config, fault: str | None = None) -> Ending:
    """One start of the run; a fault strikes where it is named."""
    os.environ.pop(faultpoints.VARIABLE, None)
    if fault is not None:
        os.environ[faultpoints.VARIABLE] = fault
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            train_on(groups, config, StopSignal())
        except MtrainError as error:
            return Ending(error.exit_code, str(error), printed.getvalue())
    return Ending(0, "", printed.getvalue())
