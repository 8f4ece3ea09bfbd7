"""`mtrain status`: how runs are doing."""

from __future__ import annotations

from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def status(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Run folders, folders of them, patterns in quotes.", show_default=False),
    ],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes with --watch.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one line each time.")] = False,
) -> None:
    """Shows step, remaining time, loss, speed, memory, ranks, last checkpoint and alarms of runs as they go on."""
    with one_message():
        import time

        show = _shown_as_json if as_json else _Screen(is_live=watch).show
        show(runs)
        while watch:
            time.sleep(interval)
            show(runs)


def _shown_as_json(runs: list[str]) -> None:
    import json

    from mtrain.report.monitor.status import find_runs, read_status

    print(json.dumps([read_status(run).as_json() for run in find_runs(runs)]), flush=True)


class _Screen:
    """Output on a terminal, where each status replaces the last one, or in a log."""

    def __init__(self, is_live: bool) -> None:
        from rich.live import Live

        from mtrain.base.log import output_console

        self._console = output_console()
        self._live = Live(console=self._console, auto_refresh=False) if is_live and self._console.is_terminal else None

    def show(self, runs: list[str]) -> None:
        from mtrain.report.monitor.status import find_runs, read_status
        from mtrain.report.monitor.table import status_view

        width = self._console.width if self._console.is_terminal else None
        view = status_view([read_status(run) for run in find_runs(runs)], width)
        if self._live is None:
            return self._console.print(view)
        self._live.start()
        self._live.update(view, refresh=True)
