"""Draws the loss curves of one or more run folders: python tools/plot_losses.py runs/a runs/b --output losses.png"""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.main import one_message
from mtrain.metrics.plot import plot_losses


def main(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="The PNG to write; losses.png in the first run folder.")] = None,
) -> None:
    """Training and validation loss, and the gradient norm, over steps."""
    picture = runs[0] / "losses.png" if output is None else output
    with one_message():
        plot_losses(runs, picture)
    typer.echo(picture)


if __name__ == "__main__":
    typer.run(main)
