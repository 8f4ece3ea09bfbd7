"""`mtrain compare`: where two runs part."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.messages import one_message


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run folder.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The other one.", show_default=False)],
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Relative difference that counts as equal; by default 1e-5, more in bf16 and fp16.", show_default=False
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for compare.html and compare.png.")] = Path(),
) -> None:
    """Compares two runs: what differs, and from which step and quantity on; exit 0 equal, 1 divergent."""
    with one_message():
        from mtrain.compare.report import report_comparison

        is_equal = report_comparison(run_a, run_b, rtol, output)
    raise typer.Exit(0 if is_equal else 1)
