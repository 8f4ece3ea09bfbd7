"""`mtrain serve`: a training service for clients of the Tinker protocol."""

import os
from pathlib import Path
from typing import Annotated

import typer

from mtrain.base.environment import RankEnvironment
from mtrain.base.errors import ConfigError
from mtrain.base.ground import require_ground
from mtrain.base.imports import without_collections
from mtrain.base.plain_files import read_plain_file
from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message, prefixed_traceback, this_rank


def serve(
    arguments: ConfigArguments,
    host: Annotated[str, typer.Option(help="Address that rank 0 listens at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the key that clients send; needed but on loopback.", show_default=False),
    ] = None,
) -> None:
    """Serves a model to clients that train it and sample from it: the tinker SDK, for one.

    One rank alone, or all ranks of a layout under torchrun or srun.
    """
    with one_message(this_rank()), prefixed_traceback():
        from mtrain.plan.layout import Layout

        require_ground()
        environment = RankEnvironment.from_environ(os.environ)
        config = loaded_config(arguments, rank=environment.rank)
        Layout.from_config(config, environment.world_size)
        token = None if token_file is None else _token(token_file)
        with without_collections():
            try:
                from mtrain.serve.run import serve as run_service
                from mtrain.serve.work import Served
            except ModuleNotFoundError as missing:
                if missing.name not in ("starlette", "uvicorn", "google", "google.protobuf", "pyarrow"):
                    raise
                raise ConfigError(
                    f"mtrain serve needs {missing.name}, which is not installed; pip install 'mtrain[serve]'"
                ) from None
        run_service(Served(config), host, port, token)


def _token(path: Path) -> str:
    try:
        return read_plain_file(path, 4096).decode().strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"--token-file {path} cannot be read: {fault}; write the key into it") from None
