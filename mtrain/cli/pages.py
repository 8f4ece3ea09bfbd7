"""`mtrain status`, `report`, `plot` and `compare`: the state of runs, pages on them, and differences between them."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Page to write; by default report.html in the run folder.")
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
    output: Annotated[
        Path | None, typer.Option(help="PNG to write; by default losses.png in the first run folder.")
    ] = None,
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
            help="Relative difference that counts as equal; by default 1e-5, larger in bf16 and fp16.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for compare.html and compare.png.")] = Path(),
) -> None:
    """Compares runs with the first one: the differences, and the step and quantity at which they begin. Exit code 0:
    equal, 1: different."""
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.report.compare.report import report_comparison, report_several

        if len(runs) == 1:
            raise ConfigError(f"only {runs[0]} is given, but two runs are needed; name a second run folder")
        if len(runs) == 2:
            is_equal = report_comparison(runs[0], runs[1], rtol, output)
        else:
            is_equal = report_several(runs, rtol, output)
    raise typer.Exit(0 if is_equal else 1)


def status(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders, their parents, or quoted patterns.", show_default=False),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes with --watch.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one line per refresh.")] = False,
) -> None:
    """Shows step, remaining time, loss, speed, memory, ranks, last checkpoint and alarms of runs."""
    with one_message():
        import json
        import time

        from rich.live import Live

        from mtrain.base.log import output_console
        from mtrain.report.monitor.status import find_runs, read_status

        console = output_console()
        # on a terminal each status replaces the last one
        live = Live(console=console, auto_refresh=False) if watch and console.is_terminal else None
        while True:
            statuses = [read_status(run) for run in find_runs(runs)]
            if as_json:
                print(json.dumps([status.as_json() for status in statuses]), flush=True)
            else:
                from mtrain.report.monitor.table import status_view  # loads the configuration's modules

                view = status_view(statuses, console.width if console.is_terminal else None)
                if live is None:
                    console.print(view)
                else:
                    live.start()
                    live.update(view, refresh=True)
            if not watch:
                return
            time.sleep(interval)
