"""`mtrain plot`: the curves of runs as a picture."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="The PNG to write; losses.png in the first run folder.")] = None,
) -> None:
    """Draws training and validation loss, and the gradient norm, over steps."""
    picture = runs[0] / "losses.png" if output is None else output
    with one_message():
        from mtrain.metrics.plot import plot_losses  # loads numpy and matplotlib

        plot_losses(runs, picture)
    typer.echo(picture)
