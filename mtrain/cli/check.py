"""`mtrain check`: what a run would be, without starting it."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.cli.arguments import ConfigArguments, loaded_config
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.preflight.findings import Findings


def check(
    arguments: ConfigArguments,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that the run will have.", show_default=False)],
    without_files: Annotated[
        bool, typer.Option("--without-files", help="Do not look at files and disks: the run is for another machine.")
    ] = False,
) -> None:
    """Checks a configuration and the files and disks that it names, and prints layout, batch, parameters, FLOPs and
    memory; loads no torch."""
    with one_message():
        from mtrain.plan.summary import print_plan

        config = loaded_config(arguments)
        print_plan(config, world_size)
        if without_files:
            return
        from mtrain.preflight.disk import look_at_disk
        from mtrain.preflight.files import look_at_files
        from mtrain.preflight.findings import Findings

        findings = Findings()
        look_at_files(config, findings)
        look_at_disk(config, findings)
    _print(findings)
    if findings.faults:
        raise typer.Exit(findings.exit_code)


def _print(findings: "Findings") -> None:
    """Facts to the output, every fault to the errors."""
    if findings.facts:
        typer.echo()
    for name, value in findings.facts:
        typer.echo(f"{name:<18}{value}")
    sys.stdout.flush()
    for fault in findings.faults:
        typer.echo(f"error: {fault}", err=True)
