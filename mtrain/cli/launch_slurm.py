"""`mtrain launch slurm`: a run as a job of Slurm."""

from pathlib import Path
from typing import Annotated

import typer

from mtrain.cli.arguments import ConfigArguments, split_arguments
from mtrain.cli.messages import one_message

_JOB, _RANKS, _IMAGE = "The job", "Its ranks", "In a container"


def slurm(
    arguments: ConfigArguments,
    nodes: Annotated[int, typer.Option(help="Nodes of the job.", show_default=False, rich_help_panel=_JOB)],
    partition: Annotated[str | None, typer.Option(rich_help_panel=_JOB)] = None,
    account: Annotated[str | None, typer.Option(rich_help_panel=_JOB)] = None,
    qos: Annotated[str | None, typer.Option(rich_help_panel=_JOB)] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit: minutes, 24:00:00 or 2-12:00:00.", rich_help_panel=_JOB)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the job; jobs of one name run one by one.", rich_help_panel=_JOB)
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Another option of sbatch, as in reservation=week.", rich_help_panel=_JOB)
    ] = None,
    max_retries: Annotated[
        int, typer.Option(help="After a lost rank, node or disk, without a newer checkpoint.", rich_help_panel=_JOB)
    ] = 3,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="As many ranks on each node.", rich_help_panel=_RANKS)
    ] = None,
    gpus_per_task: Annotated[
        int | None, typer.Option(help="Instead: each rank sees only its own.", rich_help_panel=_RANKS)
    ] = None,
    ntasks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node, if not one a GPU.", rich_help_panel=_RANKS)
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPU cores of a rank.", rich_help_panel=_RANKS)] = None,
    env_file: Annotated[
        Path | None, typer.Option(help="NAME=VALUE lines for the ranks; mode 0600.", rich_help_panel=_RANKS)
    ] = None,
    container: Annotated[str | None, typer.Option(help="Image.", rich_help_panel=_IMAGE)] = None,
    container_runtime: Annotated[str, typer.Option(help="pyxis or apptainer.", rich_help_panel=_IMAGE)] = "pyxis",
    mounts: Annotated[str | None, typer.Option(help="HOST[:CONTAINER], by commas.", rich_help_panel=_IMAGE)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit and write nothing.")] = False,
) -> None:
    """Checks a run, writes one sbatch script into its run folder, and submits it; loads no torch."""
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.launch.slurm.options import SlurmOptions
        from mtrain.launch.slurm.submit import SCRIPT, prepare, submit

        if container_runtime not in ("pyxis", "apptainer"):
            raise ConfigError(f"--container-runtime is {container_runtime!r}, but must be pyxis or apptainer")
        options = SlurmOptions(
            nodes,
            gpus_per_node,
            gpus_per_task,
            ntasks_per_node,
            cpus_per_task,
            partition,
            account,
            qos,
            time,
            name,
            container,
            "apptainer" if container_runtime == "apptainer" else "pyxis",
            tuple(mounts.split(",")) if mounts else (),
            env_file,
            max_retries,
            tuple(sbatch or ()),
        )
        paths, overrides = split_arguments(arguments)
        submission = prepare(paths, overrides, options)
        difference = submission.difference()
        if dry_run:
            typer.echo(submission.files[SCRIPT], nl=False)
            return
        if difference:
            typer.echo(f"what differs from the last submission:\n{difference}")
        submission.freeze()
        number = submit(submission)
    typer.echo(f"job {number}: {options.num_ranks} ranks on {nodes} nodes, from {submission.folder / SCRIPT}")
