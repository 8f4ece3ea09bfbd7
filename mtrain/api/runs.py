"""`mtrain.train`: a run in this process, for programs and notebooks."""

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

    A notebook's cell shows one progress bar. Interrupting the cell ends the run after the current step; the function
    returns once everything is saved, and says so. The same call continues the run.

    Returns:
        The run; `is_complete` says whether it has made all steps.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C outside IPython, and everything is saved; or twice, without saving.
        StopRequestedError: Another stop signal ended the run; everything is saved.
        MtrainError: Configuration, data, numbers or machine are at fault; IPython shows the message without traceback.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"train needs a Config from load_config, but got a {type(config).__name__}")
    if dist.is_initialized():
        raise ConfigError(
            "train opens torch.distributed, but it is already open in this process; close its engine first, with "
            "Engine.close or mtrain.close_all()"
        )
    run = TrainingRun(Path(config.run.dir))
    try:
        run_training(config)
    except KeyboardInterrupt as stop:
        if shell() is None or not str(stop):  # a second Ctrl-C has no text, and nothing was saved
            raise
        _log.warning(f"{stop}; everything is saved, and the same call continues the run ({run!r})")
    return run
