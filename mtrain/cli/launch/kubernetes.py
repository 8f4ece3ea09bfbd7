"""`mtrain launch kubernetes` and `mtrain launch torchrun`: write a manifest or commands that start a run."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mtrain.base.spelling import counted
from mtrain.cli.arguments import ConfigArguments, split_arguments, with_options
from mtrain.cli.messages import one_message


def _of(panel: str, help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


_RUN, _POD = "The run", "Its pods, one per node"


@dataclass(frozen=True)
class PodOptions:
    """Command-line options of a JobSet."""

    nodes: Annotated[int, typer.Option(help="Nodes of the run.", show_default=False, rich_help_panel=_RUN)]
    image: Annotated[
        str, typer.Option(help="Image with mtrain (launch/Dockerfile).", show_default=False, rich_help_panel=_RUN)
    ]
    volume: Annotated[list[str] | None, _of(_RUN, "CLAIM:/PATH, ReadWriteMany; one holds run.dir.")] = None
    namespace: Annotated[str | None, _of(_RUN, "Namespace of both objects.")] = None
    name: Annotated[str | None, _of(_RUN, "Name of the JobSet; by default from run.dir.")] = None
    queue: Annotated[str | None, _of(_RUN, "Queue of Kueue.")] = None
    max_retries: Annotated[
        int, _of(_RUN, "Restarts after a lost rank, node or disk; stops and preemptions do not count.")
    ] = 3
    gpus_per_node: Annotated[int | None, _of(_POD, "GPUs, and ranks, of each pod.")] = None
    cpus: Annotated[str | None, _of(_POD, "CPUs of a pod, such as 64 or 500m.")] = None
    memory: Annotated[str | None, _of(_POD, "Memory of a pod, such as 800Gi.")] = None
    shm: Annotated[str, _of(_POD, "Size of /dev/shm.")] = "16Gi"
    env_secret: Annotated[str | None, _of(_POD, "Secret with environment variables, such as tokens.")] = None
    node_selector: Annotated[list[str] | None, _of(_POD, "LABEL=VALUE of the nodes.")] = None
    grace: Annotated[int, _of(_POD, "Seconds for the last step and its save after a stop signal.")] = 300
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file instead of standard output.")
    ] = None


@with_options(PodOptions)
def kubernetes(arguments: ConfigArguments, options: PodOptions) -> None:
    """Checks a run and writes its manifest, a ConfigMap and a JobSet, for `kubectl apply -f -`; does not load torch."""
    with one_message():
        from mtrain.base.files import disk_faults
        from mtrain.launch.kubernetes.manifest import KubernetesOptions, Volume, kubernetes_job, render

        settings = dict(vars(options))
        output, grace_s = settings.pop("output"), settings.pop("grace")
        volumes = tuple(map(Volume.parsed, settings.pop("volume") or ()))
        labels = tuple(text.partition("=")[::2] for text in settings.pop("node_selector") or ())
        job = KubernetesOptions(**settings, volumes=volumes, node_selector=labels, grace_s=grace_s)
        text = render(kubernetes_job(*split_arguments(arguments), job))
        if output is None:
            typer.echo(text, nl=False)
            return
        with disk_faults(f"write {output}"):
            output.write_text(text)
    typer.echo(
        f"{output}: {counted(job.num_ranks, 'rank')} on {counted(job.nodes, 'node')}; start them with kubectl apply -f "
        f"{output}"
    )


def torchrun(
    arguments: ConfigArguments,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the run.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs, and ranks, of each node.")] = 1,
    first_node: Annotated[str, typer.Option(help="Host name or address of node 0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Free port on node 0.")] = 29500,
) -> None:
    """Checks a run and prints the command for each node; does not load torch."""
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.launch.checked import checked_config
        from mtrain.launch.torchrun import torchrun_arguments

        if nodes > 1 and first_node in ("127.0.0.1", "localhost"):
            raise ConfigError("--first-node is a loopback address, but several nodes meet there; name node 0")
        paths, overrides = split_arguments(arguments)
        checked_config(paths, overrides, nodes * gpus_per_node)
        for node in range(nodes):
            words = torchrun_arguments(nodes, gpus_per_node, str(node), first_node, port)
            typer.echo(
                shlex.join(["python", "-m", "mtrain.launch.torchrun", *words, "-m", "mtrain", "train", *arguments])
            )
