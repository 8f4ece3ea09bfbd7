"""`mtrain launch slurm`: a run as a Slurm job."""

import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.base.errors import ConfigError
from mtrain.cli.arguments import ConfigArguments, loaded_config, split_arguments
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.launch.slurm.service import ServiceOptions
    from mtrain.launch.slurm.submit import Submission
    from mtrain.preflight.findings import Findings


def _of(panel: str, help_text: str | None = None) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


_JOB, _RANKS, _IMAGE, _SERVICE = "The job", "Its ranks", "In a container", "A service instead of a run"
_Nodes = Annotated[int, typer.Option(help="Nodes of the job.", show_default=False, rich_help_panel=_JOB)]
_OfJob = Annotated[str | None, _of(_JOB)]
_Time = Annotated[str | None, _of(_JOB, "Time limit: minutes, 24:00:00 or 2-12:00:00.")]
_Name = Annotated[str | None, _of(_JOB, "Name of the job; jobs of one name run one by one.")]
_More = Annotated[list[str] | None, _of(_JOB, "Another option of sbatch, as in reservation=week.")]
_Retries = Annotated[int, _of(_JOB, "Restarts after a lost rank, node or disk without a newer checkpoint.")]
_GpusOfNode = Annotated[int | None, _of(_RANKS, "GPUs, and ranks, of each node.")]
_GpusOfTask = Annotated[int | None, _of(_RANKS, "GPUs of each rank, which sees no others.")]
_Tasks = Annotated[int | None, _of(_RANKS, "Ranks of a node; by default one a GPU.")]
_Cpus = Annotated[int | None, _of(_RANKS, "CPU cores of a rank, by default its share of the node.")]
_Gpu = Annotated[str | None, _of(_RANKS, "GPU, such as h100, for which --dry-run predicts the hours.")]
_EnvFile = Annotated[Path | None, _of(_RANKS, "NAME=VALUE lines for the ranks; mode 0600.")]
_Image = Annotated[str | None, _of(_IMAGE, "Image.")]
_Runtime = Annotated[str, _of(_IMAGE, "pyxis or apptainer.")]
_Mounts = Annotated[str | None, _of(_IMAGE, "HOST[:CONTAINER], by commas.")]
_Certify = Annotated[
    bool, _of(_RANKS, "Run mtrain verify backend on a node first, if these layers have no certificate.")
]
_Serve = Annotated[
    bool, typer.Option("--serve", help="The ranks run mtrain serve; prints its address.", rich_help_panel=_SERVICE)
]
_Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port on the first node; 8000.", rich_help_panel=_SERVICE)
]
_TokenFile = Annotated[
    Path | None, _of(_SERVICE, "File with the clients' key, created if missing; service.key in run.dir.")
]
_WithoutFiles = Annotated[
    bool, typer.Option("--without-files", help="Skip files and disks: this node does not see the job's.")
]
_DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the script, and the run to stderr; submit and write nothing."),
]

_OF_TRACKERS = {
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"),
    "mlflow": ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME"),
    "trackio": ("HF_TOKEN",),
}
"""Variables by which a tracker's library finds its server and logs in."""


def slurm(
    arguments: ConfigArguments,
    nodes: _Nodes,
    partition: _OfJob = None,
    account: _OfJob = None,
    qos: _OfJob = None,
    time: _Time = None,
    name: _Name = None,
    sbatch: _More = None,
    max_retries: _Retries = 3,
    gpus_per_node: _GpusOfNode = None,
    gpus_per_task: _GpusOfTask = None,
    ntasks_per_node: _Tasks = None,
    cpus_per_task: _Cpus = None,
    gpu: _Gpu = None,
    env_file: _EnvFile = None,
    container: _Image = None,
    container_runtime: _Runtime = "pyxis",
    mounts: _Mounts = None,
    certify: _Certify = False,
    serve: _Serve = False,
    port: _Port = None,
    token_file: _TokenFile = None,
    without_files: _WithoutFiles = False,
    dry_run: _DryRun = False,
) -> None:
    """Checks a run, writes one sbatch script into its run folder, and submits it; loads no torch.

    With --serve the job is a training service for clients: waits until it listens, and prints its address.
    """
    with one_message():
        from mtrain.launch.slurm.nodes import completed_by, nodes_of
        from mtrain.launch.slurm.options import SlurmOptions, runtime_named, with_defaults
        from mtrain.launch.slurm.submit import SCRIPT, prepare

        places = (partition, account, qos, time, name)
        image = (container, runtime_named(container_runtime), tuple(mounts.split(",")) if mounts else ())
        ranks = (gpus_per_node, gpus_per_task, ntasks_per_node, cpus_per_task)
        options = SlurmOptions(nodes, *ranks, *places, *image, env_file, max_retries, tuple(sbatch or ()), certify)
        options, notes = with_defaults(options, os.environ)
        config = loaded_config(arguments)
        service = _service(config, serve, port, token_file, container is not None)
        options, more = completed_by(options, nodes_of(options.partition), config.train.device)
        typer.echo("".join(f"{note}\n" for note in (*notes, *more)), nl=False, err=True)
        if env_file is None:
            _warn_of_secrets(arguments)
        paths, overrides = split_arguments(arguments)
        submission = prepare(paths, overrides, options, ("train",) if service is None else service.verb)
        has_files = not without_files and container is None  # paths inside a container differ
        findings = _looked_at(arguments, has_files, serve, needs_weights=not dry_run)
        if dry_run:
            _print_summary(arguments, options.num_ranks, gpu, has_files and not serve, findings)
            typer.echo(submission.files[SCRIPT], nl=False)
            return
        number = _submitted(submission, service)
        typer.echo(f"job {number}: {options.num_ranks} ranks on {nodes} nodes, from {submission.folder / SCRIPT}")
        if service is not None:
            _print_way(submission.job.run_dir, number, service)


def _submitted(submission: "Submission", service: "ServiceOptions | None") -> str:
    """Freezes and submits; prints what is new, and warnings. Returns the number of the job."""
    from mtrain.launch.slurm.submit import submit
    from mtrain.serve.checked import make_token

    if service is not None:
        make_token(service.token_file)
    if difference := submission.difference():
        typer.echo(f"what differs from the last submission:\n{difference}")
    submission.freeze()
    number, warnings = submit(submission)
    typer.echo("".join(f"{warning}\n" for warning in warnings), nl=False, err=True)
    return number


def _service(
    config: "Config", serve: bool, port: int | None, token_file: Path | None, has_container: bool
) -> "ServiceOptions | None":
    """Checks what a service needs; returns None for a run."""
    from mtrain.launch.slurm.service import ServiceOptions
    from mtrain.serve.checked import check_libraries, check_served, check_token, read_token

    if not serve:
        if port is not None or token_file is not None:
            raise ConfigError("--port and --token-file are of a service, but --serve is not given; add it")
        return None
    check_served(config.model, config.adapter)
    if not has_container:  # an image has libraries of its own
        check_libraries()
    found = ServiceOptions(8000 if port is None else port, token_file or Path(config.run.dir) / "service.key")
    if found.token_file.exists():
        check_token(found.host, read_token(found.token_file))
    return found


def _print_way(run_dir: Path, number: str, service: "ServiceOptions") -> None:
    """Waits until the service listens, and prints how to reach it."""
    from mtrain.launch.slurm.service import wait_for_service, ways_there

    typer.echo(
        f"waiting until it listens; Ctrl-C ends this wait and not the job: {run_dir / 'service.json'} gets the address"
    )
    address = wait_for_service(run_dir, number, partial(typer.echo, err=True))
    typer.echo(f"the service listens at {address}; its key is in {service.token_file}")
    typer.echo(ways_there(address, service.token_file))


def _warn_of_secrets(arguments: list[str]) -> None:
    """Warns of variables that trackers need and that the job lacks, since it gets none of this shell's."""
    for tracker in loaded_config(arguments).metrics.trackers:
        for name in _OF_TRACKERS.get(tracker, ()):
            if name in os.environ:
                typer.echo(
                    f"note: {name} is set in this shell, but a job gets nothing of it, and metrics.trackers has "
                    f"{tracker}; put {name}=VALUE into a file of mode 0600 and name it with --env-file",
                    err=True,
                )


def _print_summary(
    arguments: list[str], num_ranks: int, gpu: str | None, has_files: bool, findings: "Findings"
) -> None:
    """Prints to standard error what `mtrain check` prints, and the hours if a GPU is named."""
    from mtrain.cli.check import look_at_gpus, print_findings
    from mtrain.hf.configuration import notes_on
    from mtrain.plan.search.written import stated_machine
    from mtrain.plan.summary import plan_lines

    with redirect_stdout(sys.stderr):
        config = loaded_config(arguments, counts_epochs=has_files)
        typer.echo("\n".join(plan_lines(config, num_ranks, notes_on(config))))
        look_at_gpus(config, num_ranks, None, gpu, stated_machine(split_arguments(arguments)[0]), findings)
        print_findings(findings)
    if findings.faults:  # memory that the GPUs do not have
        raise typer.Exit(findings.exit_code)


def _looked_at(arguments: list[str], has_files: bool, serve: bool, needs_weights: bool) -> "Findings":
    """Ends the program now instead of after the queue, for faults that `mtrain check` would find in files and disks."""
    from mtrain.cli.check import print_findings
    from mtrain.preflight.findings import Findings

    findings = Findings()
    if has_files:
        from mtrain.preflight.look import Start, look

        if serve:  # reads no data
            with findings.looking():
                Start(loaded_config(arguments), findings, needs_weights).look_at_model("weights")
        else:
            # the job waits for the one that works in the folder now, and takes the folder when it starts
            look(loaded_config(arguments, counts_epochs=True), findings, needs_weights, is_now=False)
    if findings.faults:
        print_findings(Findings(faults=findings.faults))
        raise typer.Exit(findings.exit_code)
    return findings
