"""`mtrain check`: checks a run without starting it."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain.base.errors import ConfigError, with_addresses
from mtrain.base.ground import require_ground
from mtrain.base.spelling import counted
from mtrain.cli.arguments import ConfigArguments, loaded_config, split_arguments
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.plan.search.report import StatedMachine
    from mtrain.preflight.findings import Findings


def check(
    arguments: ConfigArguments,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of the run; by default from a file's `# GPUs:` line.", show_default=False),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of one GPU, such as 80GiB; says whether the run fits, or what to change.", show_default=False
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU of the run, a100, h100, h800, h200 or b200, by default from a file; predicts the hours.",
            show_default=False,
        ),
    ] = None,
    without_files: Annotated[
        bool, typer.Option("--without-files", help="Skip files and disks: the run is for another machine.")
    ] = False,
) -> None:
    """Checks a configuration, its files and disks, and everything else that a start would check; prints layout, batch,
    parameters, FLOPs and memory."""
    with one_message():
        from mtrain.hf.configuration import notes_on
        from mtrain.plan.search.report import stated_machine
        from mtrain.plan.summary import plan_lines
        from mtrain.preflight.findings import Findings

        require_ground(is_another_machine=without_files)
        config = loaded_config(arguments, counts_epochs=not without_files)
        stated = stated_machine(split_arguments(arguments)[0])
        if world_size is None:
            if stated is None:
                raise ConfigError(
                    "the number of ranks is not given; add --world-size N, or a first line such as "
                    '"# GPUs: 64 x h100 80 GiB" to a file'
                )
            world_size = stated.num_gpus
        typer.echo("\n".join(plan_lines(config, world_size, notes_on(config))))
        findings = Findings()
        if not without_files:
            from mtrain.preflight.look import look

            look(config, findings)
        look_at_gpus(config, world_size, gpu_memory, gpu, stated, findings)
        if not without_files and (config.model.backend == "auto" or config.train.compile == "auto"):
            look_for_certificates(arguments, findings)
    print_findings(findings)
    if findings.faults:
        raise typer.Exit(findings.exit_code)


def look_at_gpus(
    config: "Config",
    ranks: int,
    memory_given: str | None,
    gpu_given: str | None,
    stated: "StatedMachine | None",
    findings: "Findings",
) -> None:
    """Adds to `findings` whether the run fits into memory, and the predicted time of the run.

    Options take precedence over the machine that a file states; without any of them nothing is added. The prediction
    counts the real packed rows if `findings` knows them.
    """
    if memory_given is None and gpu_given is None and stated is None:
        return
    from mtrain.arch.layout import Layout
    from mtrain.plan.search.cost import Workload, step_cost
    from mtrain.plan.search.hardware import Cluster, gpu_named, memory_size
    from mtrain.plan.search.verdict import verdict

    name = gpu_given or ("h100" if stated is None else stated.gpu)
    cluster, steps = Cluster(gpu_named(name)), config.train.num_steps
    with findings.looking():
        memory = cluster.gpu.memory_bytes if gpu_given is not None or stated is None else stated.memory_bytes
        memory = memory if memory_given is None else memory_size(memory_given)
        findings.fact("GPU memory", verdict(config, ranks, cluster, memory))
    if steps > 0 and (gpu_given is not None or stated is not None):
        layout = Layout.from_config(config, ranks)
        packed = None if findings.packed_steps is None else findings.packed_steps(layout.dp)
        seconds = step_cost(Workload(config, layout, cluster, packed)).time.total
        is_most = packed is None and config.data.packing is not None and not config.steps_count_rows
        findings.fact(
            "time of the run",
            f"{seconds * steps / 3600:,.1f} hours on {ranks} x {name}, predicted (docs/machines/planning.md): "
            f"{counted(steps, 'step', ',')} of {seconds:.3g} s" + (", if no samples shared a row" if is_most else ""),
        )


def look_for_certificates(arguments: Sequence[str], findings: "Findings") -> None:
    """Adds how to certify layers on this machine, if it has a GPU and no certificate."""
    from mtrain.base.certificate import NVIDIA_DRIVER, certificate_folder, certificates

    with findings.looking():
        if NVIDIA_DRIVER.exists() and not any(certificates(certificate_folder())):
            findings.fact(
                "certificate",
                f"none; `mtrain verify backend {' '.join(arguments)}` takes 2 to 10 minutes on one GPU and says which "
                "layers model.backend=auto and train.compile=auto may use (or launch with --certify)",
            )


def print_findings(findings: "Findings") -> None:
    if findings.facts:
        typer.echo()
    for name, value in findings.facts:
        typer.echo(f"{name:<18}{with_addresses(value)}")
    sys.stdout.flush()
    for fault in findings.faults:
        typer.echo(f"error: {with_addresses(str(fault))}", err=True)
