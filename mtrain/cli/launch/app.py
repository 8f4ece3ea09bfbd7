"""`mtrain launch`: starts the ranks of a run."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.errors import ConfigError
from mtrain.base.ground import require_ground
from mtrain.cli.arguments import ConfigArguments, SectionedCommand, Verbs, split_arguments
from mtrain.cli.launch.kubernetes import kubernetes, torchrun
from mtrain.cli.launch.slurm import slurm
from mtrain.cli.messages import one_message

launch_app = typer.Typer(cls=Verbs, help="Starts the ranks of a run.", no_args_is_help=True)


launch_app.command(cls=SectionedCommand)(slurm)
launch_app.command(cls=SectionedCommand)(kubernetes)
launch_app.command(cls=SectionedCommand)(torchrun)


@launch_app.command(cls=SectionedCommand)
def local(
    arguments: ConfigArguments,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="Ranks to start.", show_default=False)],
    certify: Annotated[
        bool, typer.Option("--certify", help="Run mtrain verify backend first, if these layers have no certificate.")
    ] = False,
) -> None:
    """Trains with several ranks on this machine; if the first argument is a .py file, runs that program instead."""
    with one_message():
        require_ground()  # once here, instead of a message from every rank
        from mtrain.launch.local import launch_local, launch_program

        if arguments[0].endswith(".py"):
            if certify:
                raise ConfigError(
                    f"--certify compares the layers of a configuration, but {arguments[0]} is a program; run `mtrain "
                    "verify backend` with its YAML files first"
                )
            code = launch_program(num_ranks, Path(arguments[0]), arguments[1:])
        else:
            code = launch_local(num_ranks, *split_arguments(arguments), certifies=certify)
    raise typer.Exit(code)
