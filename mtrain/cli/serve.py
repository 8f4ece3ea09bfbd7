"""`mtrain serve`: a training service for clients of the Tinker protocol."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.environment import RankEnvironment
from mtrain.base.ground import require_ground
from mtrain.base.imports import without_collections
from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message, prefixed_traceback, this_rank


def serve(
    arguments: ConfigArguments,
    host: Annotated[str, typer.Option(help="Address that rank 0 listens at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the clients' key; needed except on loopback.", show_default=False),
    ] = None,
) -> None:
    """Serves a model to clients that train it and sample from it: the tinker SDK, for one.

    One rank alone, or all ranks of a layout under torchrun or srun.
    """
    with one_message(this_rank()), prefixed_traceback():
        from mtrain.arch.layout import Layout
        from mtrain.serve.checked import check_libraries, read_token

        require_ground()
        environment = RankEnvironment.from_environ(os.environ)
        config = loaded_config(arguments, rank=environment.rank)
        Layout.from_config(config, environment.world_size)
        token = None if token_file is None else read_token(token_file)
        check_libraries()
        with without_collections():
            from mtrain.serve.run import serve as run_service
            from mtrain.serve.work import Served

        run_service(Served(config), host, port, token)
