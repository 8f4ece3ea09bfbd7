"""`mtrain launch slurm`: submits a run as a Slurm job."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import counted
from mtrain.cli.arguments import ConfigArguments, loaded_config, split_arguments, with_options
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.launch.slurm.service import ServiceOptions
    from mtrain.launch.slurm.submit import Submission
    from mtrain.preflight.findings import Findings


def _of(panel: str, help_text: str | None = None) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


_JOB, _RANKS, _IMAGE, _SERVICE = "The job", "Its ranks", "In a container", "A service instead of a run"

_OF_TRACKERS = {
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"),
    "mlflow": ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME"),
    "trackio": ("HF_TOKEN",),
}
"""Tracker -> environment variables with which its library finds its server and logs in."""


@dataclass(frozen=True)
class JobOptions:
    """Command-line options of a Slurm job."""

    nodes: Annotated[int, typer.Option(help="Nodes of the job.", show_default=False, rich_help_panel=_JOB)]
    partition: Annotated[str | None, _of(_JOB)] = None
    account: Annotated[str | None, _of(_JOB)] = None
    qos: Annotated[str | None, _of(_JOB)] = None
    time: Annotated[str | None, _of(_JOB, "Time limit: minutes, 24:00:00 or 2-12:00:00.")] = None
    name: Annotated[str | None, _of(_JOB, "Name of the job; jobs with the same name run one after another.")] = None
    sbatch: Annotated[list[str] | None, _of(_JOB, "Another option of sbatch, such as reservation=week.")] = None
    max_retries: Annotated[int, _of(_JOB, "Restarts after a lost rank, node or disk without a newer checkpoint.")] = 3
    gpus_per_node: Annotated[int | None, _of(_RANKS, "GPUs, and ranks, of each node.")] = None
    gpus_per_task: Annotated[int | None, _of(_RANKS, "GPUs of each rank, which sees no others.")] = None
    ntasks_per_node: Annotated[int | None, _of(_RANKS, "Ranks of a node; by default one per GPU.")] = None
    cpus_per_task: Annotated[int | None, _of(_RANKS, "CPU cores of a rank; by default its share of the node.")] = None
    gpu: Annotated[str | None, _of(_RANKS, "GPU, such as h100, for which --dry-run predicts the hours.")] = None
    gpu_memory: Annotated[
        str | None,
        _of(_RANKS, "Memory of one GPU, such as 80GiB; --dry-run compares it with the memory that the run needs."),
    ] = None
    env_file: Annotated[Path | None, _of(_RANKS, "NAME=VALUE lines for the ranks; mode 0600.")] = None
    container: Annotated[str | None, _of(_IMAGE, "Image.")] = None
    container_runtime: Annotated[str, _of(_IMAGE, "pyxis or apptainer.")] = "pyxis"
    mounts: Annotated[str | None, _of(_IMAGE, "HOST[:CONTAINER], separated by commas.")] = None
    certify: Annotated[
        bool, _of(_RANKS, "Run mtrain verify backend on a node first, if these layers have no certificate.")
    ] = False
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Run mtrain serve on the ranks, and print its address.", rich_help_panel=_SERVICE),
    ] = False
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on the first node; by default 8000.", rich_help_panel=_SERVICE),
    ] = None
    token_file: Annotated[
        Path | None, _of(_SERVICE, "File with the clients' key, created if missing; by default service.key in run.dir.")
    ] = None
    without_files: Annotated[
        bool, typer.Option("--without-files", help="Skip files and disks, if this node does not see the job's.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script, and the run on stderr; submit and write nothing.")
    ] = False


@with_options(JobOptions)
def slurm(arguments: ConfigArguments, options: JobOptions) -> None:
    """Checks a run, writes an sbatch script into its run folder, and submits it; does not load torch.

    With --serve the job is a training service for clients; the command waits until it listens, and prints its address.
    """
    with one_message():
        from mtrain.launch.slurm.options import SlurmOptions, completed_by, nodes_of, runtime_named, with_defaults
        from mtrain.launch.slurm.submit import SCRIPT, prepare

        queue_options = (options.partition, options.account, options.qos, options.time, options.name)
        mounts = tuple(options.mounts.split(",")) if options.mounts else ()
        image = (options.container, runtime_named(options.container_runtime), mounts)
        ranks = (options.gpus_per_node, options.gpus_per_task, options.ntasks_per_node, options.cpus_per_task)
        job = SlurmOptions(
            options.nodes,
            *ranks,
            *queue_options,
            *image,
            options.env_file,
            options.max_retries,
            tuple(options.sbatch or ()),
            options.certify,
        )
        job, notes = with_defaults(job, os.environ)
        config = loaded_config(arguments)
        service = _service(config, options)
        job, more = completed_by(job, nodes_of(job.partition), config.train.device)
        typer.echo("".join(f"{note}\n" for note in (*notes, *more)), nl=False, err=True)
        if options.env_file is None:
            _warn_of_secrets(config.metrics.trackers)
        submission = prepare(*split_arguments(arguments), job, ("train",) if service is None else service.verb)
        has_files = not options.without_files and options.container is None  # paths inside a container differ
        findings = _checked_files(arguments, has_files, options.serve, needs_weights=not options.dry_run)
        if options.dry_run:
            _print_summary(arguments, job.num_ranks, options, has_files and not options.serve, findings)
            typer.echo(submission.files[SCRIPT], nl=False)
            return
        number = _submitted(submission, service)
        typer.echo(
            f"job {number}: {counted(job.num_ranks, 'rank')} on {counted(job.nodes, 'node')}, from "
            f"{submission.folder / SCRIPT}"
        )
        if service is None:
            return
        from mtrain.launch.slurm.service import wait_for_service, ways_there

        address_file = submission.job.run_dir / "service.json"
        typer.echo(f"waiting until it listens; Ctrl-C only ends this wait, and {address_file} will have the address")
        address = wait_for_service(submission.job.run_dir, number, partial(typer.echo, err=True))
        typer.echo(f"the service listens on {address}; its key is in {service.token_file}")
        typer.echo(ways_there(address, service.token_file))


def _submitted(submission: "Submission", service: "ServiceOptions | None") -> str:
    """Writes and submits the job; prints changes since the last submission, and warnings. Returns the job's number."""
    from mtrain.launch.slurm.submit import submit
    from mtrain.serve.checked import make_token

    if service is not None:
        make_token(service.token_file)
    if difference := submission.difference():
        typer.echo(f"differences from the last submission:\n{difference}")
    submission.freeze()
    number, warnings = submit(submission)
    typer.echo("".join(f"{warning}\n" for warning in warnings), nl=False, err=True)
    return number


def _service(config: "Config", options: JobOptions) -> "ServiceOptions | None":
    """Checks the requirements of a service, and returns its options; None for a run."""
    from mtrain.launch.slurm.service import ServiceOptions
    from mtrain.serve.checked import check_libraries, check_served, check_token, read_token

    if not options.serve:
        if options.port is not None or options.token_file is not None:
            raise ConfigError("--port and --token-file need --serve, which is not given; add it")
        return None
    check_served(config.model, config.adapter)
    if options.container is None:  # an image has its own libraries
        check_libraries()
    token_file = options.token_file or Path(config.run.dir) / "service.key"
    service = ServiceOptions(8000 if options.port is None else options.port, token_file)
    if service.token_file.exists():
        check_token(service.host, read_token(service.token_file))
    return service


def _warn_of_secrets(trackers: Sequence[str]) -> None:
    """Warns of this shell's variables that trackers need, since the job does not inherit them."""
    for tracker in trackers:
        for name in _OF_TRACKERS.get(tracker, ()):
            if name in os.environ:
                typer.echo(
                    f"note: {name} is set in this shell, but jobs do not inherit it, and metrics.trackers has "
                    f"{tracker}; put {name}=VALUE into a file of mode 0600 and name it with --env-file",
                    err=True,
                )


def _print_summary(
    arguments: list[str], num_ranks: int, options: JobOptions, has_files: bool, findings: "Findings"
) -> None:
    """Prints the output of `mtrain check` to standard error, with the predicted hours if a GPU is named."""
    from mtrain.cli.check import look_at_gpus, print_findings
    from mtrain.hf.configuration import notes_on
    from mtrain.plan.search.report import stated_machine
    from mtrain.plan.summary import plan_lines

    with redirect_stdout(sys.stderr):
        config = loaded_config(arguments, counts_epochs=has_files)
        typer.echo("\n".join(plan_lines(config, num_ranks, notes_on(config))))
        stated = stated_machine(split_arguments(arguments)[0])
        look_at_gpus(config, num_ranks, options.gpu_memory, options.gpu, stated, findings)
        if config.train.device != "cpu" and (options.gpu_memory, options.gpu, stated) == (None, None, None):
            findings.fact("GPU memory", "not compared with the table; add --gpu h100, or --gpu-memory 80GiB")
        print_findings(findings)
    if findings.faults:  # such as too little GPU memory
        raise typer.Exit(findings.exit_code)


def _checked_files(arguments: list[str], has_files: bool, serve: bool, needs_weights: bool) -> "Findings":
    """Checks files and disks as `mtrain check` does; ends the program on faults, before the job waits in a queue."""
    from mtrain.cli.check import print_findings
    from mtrain.preflight.findings import Findings

    findings = Findings()
    if has_files:
        from mtrain.preflight.look import Start, look

        if serve:  # reads no data
            with findings.looking():
                Start(loaded_config(arguments), findings, needs_weights).look_at_model("weights")
        else:
            # a current job in the same folder is allowed: the new job waits for it, and locks the folder when it starts
            look(loaded_config(arguments, counts_epochs=True), findings, needs_weights, is_now=False)
    if findings.faults:
        print_findings(Findings(faults=findings.faults))
        raise typer.Exit(findings.exit_code)
    return findings
