"""`mtrain plan`: the best layouts of a run on a number of GPUs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.base.errors import ConfigError
from mtrain.cli.arguments import offered, split_arguments, with_options
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.config.load import MergedContent

_ASSUMED: dict[str, dict[str, Any]] = {
    "run": {"dir": "runs/planned"},
    "train": {"num_steps": 2**31 - 1},
    "optimizer": {"lr": 1e6},
    "data": {"kind": "mock"},
}
"""Values that a run needs but no prediction depends on, used if the user gives none and never written. They exceed any
warm-up, step and `min_lr` of the user."""
_HARDWARE = "Hardware"


@dataclass(frozen=True)
class PlanOptions:
    """Machine and batch of a planned run, and options of the output."""

    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run.", show_default=False)]
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of one GPU, such as 80GiB; by default from --gpu.", show_default=False)
    ] = None
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens per sample (data.seq_length).", show_default=False)
    ] = None
    global_batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per step.", show_default=False)] = None
    gpu: Annotated[str, typer.Option(help="a100, h100, h800, h200 or b200.", rich_help_panel=_HARDWARE)] = "h100"
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.", rich_help_panel=_HARDWARE)] = 8
    tflops: Annotated[float | None, typer.Option(min=0.1, help="Dense bf16 peak.", rich_help_panel=_HARDWARE)] = None
    nvlink_gbs: Annotated[
        float | None, typer.Option(min=0.1, help="GB/s, one direction.", rich_help_panel=_HARDWARE)
    ] = None
    network_gbs: Annotated[
        float | None, typer.Option(min=0.1, help="GB/s of a GPU's network card.", rich_help_panel=_HARDWARE)
    ] = None
    measured: Annotated[
        Path | None,
        typer.Option(help="machine.json of mtrain verify machine with a node's links.", rich_help_panel=_HARDWARE),
    ] = None
    top: Annotated[int, typer.Option(min=1, max=50, help="Layouts to show.")] = 5
    write: Annotated[
        Path | None, typer.Option(help="Write the first layout as a configuration.", show_default=False)
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


@with_options(PlanOptions)
def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL... [section.key=value...]",
            help="YAML files (of a model or a whole run), or a Hugging Face folder or config.json.",
            show_default=False,
            autocompletion=offered,
        ),
    ],
    options: PlanOptions,
) -> None:
    """Ranks the layouts that fit by predicted step time; docs/machines/planning.md describes the cost model."""
    with one_message():
        from mtrain.plan.search import report
        from mtrain.plan.search.hardware import Cluster, gpu_named, memory_size, read_links
        from mtrain.plan.search.search import search

        overrides = {
            "flops": None if options.tflops is None else options.tflops * 1e12,
            "nvlink_bandwidth": None if options.nvlink_gbs is None else options.nvlink_gbs * 1e9,
            "network_bandwidth": None if options.network_gbs is None else options.network_gbs * 1e9,
        }
        changed: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        cluster = Cluster(replace(gpu_named(options.gpu), **changed), options.gpus_per_node)
        if options.measured is not None:
            if options.nvlink_gbs is not None:
                raise ConfigError(
                    "--measured and --nvlink-gbs both give the speed of a node's links; remove one of them"
                )
            cluster = cluster.measured(read_links(options.measured))
        memory = cluster.gpu.memory_bytes if options.gpu_memory is None else memory_size(options.gpu_memory)
        merged = _read_models(models, options.seq_length, options.global_batch_size)
        config, assumed = _completed(merged)
        result = search(config, options.gpus, cluster, memory, options.top)
        if options.as_json:
            typer.echo(json.dumps(report.as_json(result, cluster), indent=2))
        if not result.choices:
            raise report.nothing_fits(config, result, options.gpus, memory)
        if not options.as_json:
            for line in report.lines(result, options.gpus, cluster, memory):
                typer.echo(line)
        if options.write is not None:
            report.write_choice(result.choices[0], merged.content, assumed, cluster, memory, options.write)
            if not options.as_json:
                lacking = f" without {', '.join(assumed)}; add the run's values, then" if assumed else ":"
                typer.echo(f"\nwritten to {options.write}{lacking} mtrain check {options.write}")


def _read_models(models: list[str], seq_length: int | None, global_batch_size: int | None) -> "MergedContent":
    """Reads YAML, overrides and options; Hugging Face folders become model.hf, config.json files the architecture."""
    from mtrain.config.load import MergedContent, read_merged

    paths, overrides = split_arguments(models)
    folders = [path for path in paths if path.is_dir()]
    descriptions = [path for path in paths if path.name == "config.json" and path.is_file()]
    for folder in (*folders, *(path.parent for path in descriptions)):
        overrides = [f"model.hf={json.dumps(str(folder))}", *overrides]
    if seq_length is not None:
        overrides = [*overrides, f"data.seq_length={seq_length}"]
    if global_batch_size is not None:
        overrides = [*overrides, f"train.global_batch_size={global_batch_size}"]
    merged = read_merged([path for path in paths if path not in folders and path not in descriptions], overrides)
    if not descriptions:
        return merged
    model = _completed(merged)[0].model.model_dump(exclude_defaults=True, exclude={"hf"})
    return MergedContent({**merged.content, "model": model}, merged.sources)


def _completed(merged: "MergedContent") -> tuple["Config", list[str]]:
    """Adds assumed values; returns the configuration and the assumed keys."""
    from mtrain.config.schema.data import MockSection
    from mtrain.hf.configuration import resolved

    content, assumed = dict(merged.content), []
    for name, keys in _ASSUMED.items():
        section = content.get(name, {})
        if not isinstance(section, dict):
            continue  # validation refuses it
        if name == "data" and not section.keys() <= MockSection.model_fields.keys():
            continue  # another kind of data
        missing = {key: value for key, value in keys.items() if key not in section}
        if section.get("num_epochs") is not None:  # gives the length as well
            missing.pop("num_steps", None)
        content[name] = {**missing, **section}
        assumed += [f"{name}.{key}" for key in missing]
    return replace(merged, content=content).config(resolved), assumed
