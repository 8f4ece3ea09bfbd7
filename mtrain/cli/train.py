"""`mtrain train`: one rank of a run."""

import os

from mtrain.base.environment import RankEnvironment
from mtrain.base.ground import require_ground
from mtrain.base.imports import without_collections
from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message, prefixed_traceback, this_rank


def train(arguments: ConfigArguments) -> None:
    """Trains as one rank: under torchrun, under srun, or alone."""
    with one_message(this_rank()), prefixed_traceback():
        from mtrain.arch.layout import Layout
        from mtrain.watch.rank import watched

        require_ground()
        environment = RankEnvironment.from_environ(os.environ)
        config = loaded_config(arguments, rank=environment.rank)
        Layout.from_config(config, environment.world_size)
        with watched(config, environment):
            # torch is loaded only after the configuration has been checked, and while the watchdog watches
            with without_collections():
                from mtrain.training.trainer import train as run_training

            run_training(config)
