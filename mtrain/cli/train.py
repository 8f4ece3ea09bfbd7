"""`mtrain train`: one rank of a run."""

import os

from mtrain.base.environment import RankEnvironment
from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message, prefixed_traceback


def train(arguments: ConfigArguments) -> None:
    """Trains as one rank: under torchrun, under srun, or alone."""
    with one_message(), prefixed_traceback():
        from mtrain.plan.layout import Layout

        world_size = RankEnvironment.from_environ(os.environ).world_size
        config = loaded_config(arguments)
        Layout.from_config(config, world_size)
        from mtrain.training.trainer import train as run_training  # torch, only after the configuration is proved right

        run_training(config)
