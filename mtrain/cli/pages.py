"""`mtrain report`, `plot` and `compare`: pages and pictures of runs, and where they diverge."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page to write; report.html in the run folder.")
    ] = None,
) -> None:
    """Writes one HTML file on a run: curves, speed, memory, starts, events, ranks and configuration."""
    page = run / "report.html" if output is None else output
    with one_message():
        from mtrain.report.monitor.page import write_run_page  # loads numpy and matplotlib

        write_run_page(run, page)
    typer.echo(page)


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="The PNG to write; losses.png in the first run folder.")] = None,
) -> None:
    """Draws training and validation loss, and the gradient norm, over steps."""
    picture = runs[0] / "losses.png" if output is None else output
    with one_message():
        from mtrain.report.metrics.plot import plot_losses  # loads numpy and matplotlib

        plot_losses(runs, picture)
    typer.echo(picture)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two run folders or more.", show_default=False)],
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Relative difference that counts as equal; by default 1e-5, more in bf16 and fp16.", show_default=False
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for compare.html and compare.png.")] = Path(),
) -> None:
    """Compares runs with the first one: what differs, and from which step and quantity on; exit 0 equal, 1
    divergent."""
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.report.compare.report import report_comparison
        from mtrain.report.compare.several import report_several

        if len(runs) == 1:
            raise ConfigError(f"only {runs[0]} is given, but it is compared with others; name a second run folder")
        if len(runs) == 2:
            is_equal = report_comparison(runs[0], runs[1], rtol, output)
        else:
            is_equal = report_several(runs, rtol, output)
    raise typer.Exit(0 if is_equal else 1)
