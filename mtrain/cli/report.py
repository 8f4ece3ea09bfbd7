"""`mtrain report`: one run as a page."""

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
        from mtrain.monitor.page import write_run_page  # loads numpy and matplotlib

        write_run_page(run, page)
    typer.echo(page)
