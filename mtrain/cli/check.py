"""`mtrain check`: what a run would be, without starting it."""

from typing import Annotated

import typer

from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message


def check(
    arguments: ConfigArguments,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that the run will have.", show_default=False)],
) -> None:
    """Checks a configuration and prints layout, batch, parameters, FLOPs and memory; loads no torch."""
    with one_message():
        from mtrain.plan.summary import print_plan

        print_plan(loaded_config(arguments), world_size)
