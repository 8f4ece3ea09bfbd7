"""`mtrain launch kubernetes` and `mtrain launch torchrun`: runs that another program starts, as files and commands."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mtrain.cli.arguments import ConfigArguments, split_arguments
from mtrain.cli.messages import one_message


def _of(panel: str, help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


_RUN, _POD = "The run", "Its pods, one per node"
_Nodes = Annotated[int, typer.Option(help="Nodes of the run.", show_default=False, rich_help_panel=_RUN)]
_Image = Annotated[
    str, typer.Option(help="Image with mtrain (launch/Dockerfile).", show_default=False, rich_help_panel=_RUN)
]
_Volumes = Annotated[list[str] | None, _of(_RUN, "CLAIM:/PATH, ReadWriteMany; one holds run.dir.")]
_Namespace = Annotated[str | None, _of(_RUN, "Namespace of both objects.")]
_Name = Annotated[str | None, _of(_RUN, "Name of the JobSet; by default from run.dir.")]
_Queue = Annotated[str | None, _of(_RUN, "Queue of Kueue.")]
_Retries = Annotated[int, _of(_RUN, "Restarts after a lost rank, node or disk; stops and preemptions do not count.")]
_Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file instead of standard output.")]
_Gpus = Annotated[int | None, _of(_POD, "GPUs, and ranks, of each pod.")]
_Cpus = Annotated[str | None, _of(_POD, "Processors of a pod, as in 64 or 500m.")]
_Memory = Annotated[str | None, _of(_POD, "Memory of a pod, as in 800Gi.")]
_Shm = Annotated[str, _of(_POD, "Size of /dev/shm.")]
_Secret = Annotated[str | None, _of(_POD, "Secret with environment variables, such as tokens.")]
_Selector = Annotated[list[str] | None, _of(_POD, "LABEL=VALUE of the nodes.")]
_Grace = Annotated[int, _of(_POD, "Seconds for the last step and its save.")]


def kubernetes(
    arguments: ConfigArguments,
    nodes: _Nodes,
    image: _Image,
    volume: _Volumes = None,
    namespace: _Namespace = None,
    name: _Name = None,
    queue: _Queue = None,
    max_retries: _Retries = 3,
    gpus_per_node: _Gpus = None,
    cpus: _Cpus = None,
    memory: _Memory = None,
    shm: _Shm = "16Gi",
    env_secret: _Secret = None,
    node_selector: _Selector = None,
    grace: _Grace = 300,
    output: _Output = None,
) -> None:
    """Checks a run and writes its manifest, a ConfigMap and a JobSet, for `kubectl apply -f -`; loads no torch."""
    with one_message():
        from mtrain.base.files import disk_faults
        from mtrain.launch.kubernetes.manifest import KubernetesOptions, Volume, kubernetes_job, render

        pairs = [text.partition("=")[::2] for text in node_selector or ()]
        options = KubernetesOptions(
            nodes=nodes,
            image=image,
            gpus_per_node=gpus_per_node,
            volumes=tuple(map(Volume.parsed, volume or ())),
            cpus=cpus,
            memory=memory,
            shm=shm,
            namespace=namespace,
            name=name,
            queue=queue,
            env_secret=env_secret,
            node_selector=tuple(pairs),
            max_retries=max_retries,
            grace_s=grace,
        )
        text = render(kubernetes_job(*split_arguments(arguments), options))
        if output is None:
            typer.echo(text, nl=False)
            return
        with disk_faults(f"write {output}"):
            output.write_text(text)
    typer.echo(f"{output}: {options.num_ranks} ranks on {nodes} nodes; start them with kubectl apply -f {output}")


def torchrun(
    arguments: ConfigArguments,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the run.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node; each gets a rank.")] = 1,
    first_node: Annotated[str, typer.Option(help="Host name or address of node 0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="A free port on node 0.")] = 29500,
) -> None:
    """Checks a run and prints the command for each of its nodes; loads no torch."""
    with one_message():
        from mtrain.base.errors import ConfigError
        from mtrain.launch.checked import checked_config
        from mtrain.launch.torchrun import torchrun_arguments

        if nodes > 1 and first_node in ("127.0.0.1", "localhost"):
            raise ConfigError("--first-node is this machine's own address, but several nodes meet there; name node 0")
        paths, overrides = split_arguments(arguments)
        checked_config(paths, overrides, nodes * gpus_per_node)
        for node in range(nodes):
            words = torchrun_arguments(nodes, gpus_per_node, str(node), first_node, port)
            typer.echo(
                shlex.join(["python", "-m", "mtrain.launch.torchrun", *words, "-m", "mtrain", "train", *arguments])
            )
