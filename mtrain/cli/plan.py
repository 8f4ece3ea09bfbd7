"""`mtrain plan`: which layout a run should have on a number of GPUs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain.cli.arguments import split_arguments
from mtrain.cli.messages import one_message

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.config.load import Given
    from mtrain.plan.search.hardware import Cluster

_ASSUMED: dict[str, dict[str, Any]] = {
    "run": {"dir": "runs/planned"},
    "train": {"num_steps": 2**31 - 1},
    "optimizer": {"lr": 1e6},
    "data": {"kind": "mock"},
}
"""Values that a run needs, but no prediction depends on: assumed if the user gives none, and never written. They exceed
any warm-up, step and `min_lr` of the user."""
_HARDWARE = "Hardware"
_Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL... [section.key=value...]",
        help="YAML files (of a model alone, or of a whole run), or a folder or config.json of Hugging Face.",
        show_default=False,
    ),
]
_Gpus = Annotated[int, typer.Option(min=1, help="GPUs of the run.", show_default=False)]
_Memory = Annotated[
    str | None, typer.Option(help="Memory of one GPU, such as 80GiB; by default that of --gpu.", show_default=False)
]
_Seq = Annotated[int | None, typer.Option(min=2, help="Tokens per sample (data.seq_length).", show_default=False)]
_Batch = Annotated[int | None, typer.Option(min=1, help="Samples per step.", show_default=False)]
_Gpu = Annotated[str, typer.Option(help="a100, h100, h800, h200 or b200.", rich_help_panel=_HARDWARE)]
_PerNode = Annotated[int, typer.Option(min=1, help="GPUs of a node.", rich_help_panel=_HARDWARE)]
_Tflops = Annotated[float | None, typer.Option(min=0.1, help="Dense bf16 peak.", rich_help_panel=_HARDWARE)]
_Nvlink = Annotated[float | None, typer.Option(min=0.1, help="GB/s, one direction.", rich_help_panel=_HARDWARE)]
_Network = Annotated[
    float | None, typer.Option(min=0.1, help="GB/s of a GPU's network card.", rich_help_panel=_HARDWARE)
]
_Top = Annotated[int, typer.Option(min=1, max=50, help="Layouts to show.")]
_Write = Annotated[Path | None, typer.Option(help="Write the first layout as a configuration.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(
    models: _Models,
    gpus: _Gpus,
    gpu_memory: _Memory = None,
    seq_length: _Seq = None,
    global_batch_size: _Batch = None,
    gpu: _Gpu = "h100",
    gpus_per_node: _PerNode = 8,
    tflops: _Tflops = None,
    nvlink_gbs: _Nvlink = None,
    network_gbs: _Network = None,
    top: _Top = 5,
    write: _Write = None,
    as_json: _Json = False,
) -> None:
    """Ranks the layouts that fit by the time of a step, which a stated model predicts (docs/machines/planning.md)."""
    with one_message():
        from mtrain.plan.search import report
        from mtrain.plan.search.hardware import memory_size
        from mtrain.plan.search.search import search
        from mtrain.plan.search.written import write_choice

        cluster = _cluster(gpu, gpus_per_node, tflops, nvlink_gbs, network_gbs)
        memory = cluster.gpu.memory_bytes if gpu_memory is None else memory_size(gpu_memory)
        given = _given(models, seq_length, global_batch_size)
        config, assumed = _completed(given)
        found = search(config, gpus, cluster, memory, top)
        if as_json:
            typer.echo(json.dumps(report.as_json(found, cluster), indent=2))
        if not found.choices:
            raise report.nothing_fits(config, found, gpus, memory)
        if not as_json:
            for line in report.lines(found, gpus, cluster, memory):
                typer.echo(line)
        if write is not None:
            write_choice(found.choices[0], given.content, assumed, cluster, memory, write)
            if not as_json:
                lacking = f" without {', '.join(assumed)}; add what the run shall have, then" if assumed else ":"
                typer.echo(f"\nwritten to {write}{lacking} mtrain check {write}")


def _cluster(
    gpu: str, gpus_per_node: int, tflops: float | None, nvlink_gbs: float | None, network_gbs: float | None
) -> "Cluster":
    from mtrain.plan.search.hardware import Cluster, gpu_named

    given = {
        "flops": None if tflops is None else tflops * 1e12,
        "nvlink_bandwidth": None if nvlink_gbs is None else nvlink_gbs * 1e9,
        "network_bandwidth": None if network_gbs is None else network_gbs * 1e9,
    }
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return Cluster(replace(gpu_named(gpu), **changed), gpus_per_node)


def _given(models: list[str], seq_length: int | None, global_batch_size: int | None) -> "Given":
    """Reads YAML files, overrides and options; of a Hugging Face folder its name, of a config.json the architecture."""
    from mtrain.config.load import Given, read_given

    paths, overrides = split_arguments(models)
    folders = [path for path in paths if path.is_dir()]
    descriptions = [path for path in paths if path.name == "config.json" and path.is_file()]
    for folder in (*folders, *(path.parent for path in descriptions)):
        overrides = [f"model.hf={json.dumps(str(folder))}", *overrides]
    if seq_length is not None:
        overrides = [*overrides, f"data.seq_length={seq_length}"]
    if global_batch_size is not None:
        overrides = [*overrides, f"train.global_batch_size={global_batch_size}"]
    given = read_given([path for path in paths if path not in folders and path not in descriptions], overrides)
    if not descriptions:
        return given
    model = _completed(given)[0].model.model_dump(exclude_defaults=True, exclude={"hf"})
    return Given({**given.content, "model": model}, given.sources)


def _completed(given: "Given") -> tuple["Config", list[str]]:
    """Fills in assumed values; returns the configuration and the keys that were assumed."""
    from mtrain.config.schema.data import MockSection
    from mtrain.hf.configuration import resolved

    content, assumed = dict(given.content), []
    for name, keys in _ASSUMED.items():
        section = content.get(name, {})
        if not isinstance(section, dict):
            continue  # refused with the rest
        if name == "data" and not section.keys() <= MockSection.model_fields.keys():
            continue  # another kind of data, named or not
        if section.get("num_epochs") is not None:  # no prediction depends on the length
            section = {**section, "num_epochs": None, "num_steps": keys["num_steps"]}
        missing = {key: value for key, value in keys.items() if key not in section}
        content[name] = {**missing, **section}
        assumed += [f"{name}.{key}" for key in missing]
    return replace(given, content=content).config(resolved), assumed
