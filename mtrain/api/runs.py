"""`mtrain.train`: a run in this process, as the cell of a notebook wants it."""

import logging
from pathlib import Path

import torch.distributed as dist

from mtrain.base.errors import ConfigError
from mtrain.base.notebook import shell
from mtrain.config import Config
from mtrain.report.monitor.training_run import TrainingRun
from mtrain.training.trainer import train as run_training

_log = logging.getLogger(__name__)


def train(config: Config) -> TrainingRun:
    """Trains in this process as `mtrain train` does: from the newest checkpoint of `run.dir`, or from the start.

    In a notebook the cell has one progress bar. Interrupting it (Ctrl-C) ends the run after the current step; the
    function then returns once everything is saved, and says so. The same call continues the run.

    Returns:
        The run, whose `is_complete` says whether it made all its steps.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C in a program outside IPython; everything is saved.
        StopRequestedError: Another stop signal ended the run; everything is saved.
        MtrainError: The configuration, the data, a number or the machine is at fault; IPython shows only the message.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"train needs a Config from load_config, but got a {type(config).__name__}")
    if dist.is_initialized():
        raise ConfigError(
            "train opens torch.distributed, but this process has it open already; close its engine first, with "
            "Engine.close or mtrain.close_all()"
        )
    run = TrainingRun(Path(config.run.dir))
    try:
        run_training(config)
    except KeyboardInterrupt as stop:
        if shell() is None or not str(stop):  # without a reason it is a second Ctrl-C, and nothing was saved
            raise
        _log.warning(f"{stop}; everything is saved, and the same call continues the run ({run!r})")
    return run
