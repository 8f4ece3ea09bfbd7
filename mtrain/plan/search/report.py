"""Output of a search: a table, JSON, and a configuration file that states its machine."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.arch.memory import MemoryEstimate
from mtrain.base.errors import ConfigError
from mtrain.base.files import disk_faults, write_atomically
from mtrain.base.spelling import counted
from mtrain.base.yaml_text import yaml_text
from mtrain.config import Config
from mtrain.config.schema.train import TrainSection
from mtrain.plan.search.candidates import OVERLAPS
from mtrain.plan.search.cost import Workload, step_mfu
from mtrain.plan.search.hardware import GIB, USABLE_MEMORY, Cluster, MeasuredLinks
from mtrain.plan.search.search import Choice, SearchResult

_GB = 10**9
_NAMES = {
    "matrices": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise kernels",
    "recompute": "recomputation",
    "tp": "tensor-parallel transfers",
    "cp": "context-parallel transfers",
    "ep": "transfers of tokens to experts",
    "p2p": "transfers between stages",
    "bubble": "the pipeline's bubble",
    "dp": "exposed gathers of weights and reductions of gradients",
    "update": "the update",
}
_HEADER = ("", "layout", "micro-batch", "recompute", "GiB", "bubble", "NVLink GB", "network GB", "step s", "MFU")


def recompute_name(train: TrainSection) -> str:
    if train.recompute_modules is None:
        return train.recompute + ("" if train.recompute_layers is None else f" {train.recompute_layers}")
    return "+".join(train.recompute_modules)


def lines(result: SearchResult, num_gpus: int, cluster: Cluster, memory_bytes: int) -> Iterator[str]:
    """Yields the lines of the table, and how each alternative compares with the first."""
    gpu = cluster.gpu
    nvlink = f"NVLink {gpu.nvlink_bandwidth / _GB:.0f} GB/s, " if cluster.links is None else ""
    yield (
        f"{num_gpus} x {gpu.name} of {memory_bytes / GIB:.0f} GiB, {cluster.gpus_per_node} a node: "
        f"{gpu.flops / 1e12:.0f} TFLOP/s, {nvlink}network "
        f"{gpu.network_bandwidth / _GB:.0f} GB/s a GPU; the estimate may fill {USABLE_MEMORY:.0%} of the memory"
    )
    if cluster.links is not None:
        yield f"links in a node: {cluster.links}"
    counts = result.counts
    yield (
        f"{counted(counts.bounded, 'layout', ',')}, {counts.tried:,} not excluded by a bound, {counts.measured:,} "
        "memory estimates"
    )
    yield ""
    rows = [_HEADER, *(_row(number, choice, cluster) for number, choice in enumerate(result.choices, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        aligned = (
            text.ljust(width) if heading in ("layout", "recompute") else text.rjust(width)
            for heading, text, width in zip(_HEADER, row, widths)
        )
        yield "  ".join(aligned).rstrip()
    yield ""
    yield from _explained(result.choices)


def _mfu(choice: Choice, cluster: Cluster) -> float:
    return step_mfu(Workload(choice.config, choice.layout, cluster), choice.cost.time.total)


def _row(number: int, choice: Choice, cluster: Cluster) -> tuple[str, ...]:
    cost = choice.cost
    return (
        str(number),
        str(choice.layout),
        str(choice.config.train.micro_batch_size),
        recompute_name(choice.config.train),
        f"{choice.memory.total_bytes / GIB:.1f}",
        f"{cost.bubble_share:.1%}",
        f"{cost.sent.nvlink_bytes / _GB:.1f}",
        f"{cost.sent.network_bytes / _GB:.1f}",
        f"{cost.time.total:.3f}",
        f"{_mfu(choice, cluster):.1%}",
    )


def _explained(choices: list[Choice]) -> Iterator[str]:
    """Yields the largest components of the first choice, and how much slower each alternative is, and why."""
    first = choices[0]
    parts = first.cost.time.parts()
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    shares = ", ".join(f"{_NAMES[name]} {parts[name] / first.cost.time.total:.0%}" for name in largest)
    memory = ", ".join(f"{name} {count / GIB:.1f}" for name, count in _bytes_of(first.memory).items())
    yield f"1 spends its step on {shares}; GiB of its heaviest rank: {memory}."
    for number, other in enumerate(choices[1:], 2):
        more = {name: seconds - parts[name] for name, seconds in other.cost.time.parts().items()}
        slower = other.cost.time.total / first.cost.time.total - 1
        yield f"{number} is {slower:.1%} slower: {_difference(more)}."


def _bytes_of(memory: MemoryEstimate) -> dict[str, int]:
    names = ("weights", "gradients", "optimizer", "activations")
    return {name: getattr(memory, f"{name}_bytes") for name in names}


def _difference(more: dict[str, float]) -> str:
    """Names the component that adds most time, and the one that saves most."""
    worst = max(more, key=lambda name: more[name])
    best = min(more, key=lambda name: more[name])
    text = f"{more[worst]:.3f} s more for {_NAMES[worst]}"
    return text if more[best] > -5e-4 else f"{text}, {-more[best]:.3f} s less for {_NAMES[best]}"


def as_json(result: SearchResult, cluster: Cluster) -> dict[str, Any]:
    """Returns the results as JSON content; times are in seconds, sizes in bytes, shares from 0 to 1."""
    return {
        "counts": vars(result.counts),
        "gpu": vars(cluster.gpu),
        "links": None if cluster.links is None else _summary(cluster.links),
        "choices": [_plain(choice, cluster) for choice in result.choices],
        "closest": None if result.closest is None else _plain(result.closest, cluster),
    }


def _summary(links: MeasuredLinks) -> dict[str, Any]:
    names = ("created", "device", "num_ranks", "bandwidth", "latency_s", "fingerprint")
    return {name: getattr(links, name) for name in names}


def _plain(choice: Choice, cluster: Cluster) -> dict[str, Any]:
    config, cost, memory = choice.config, choice.cost, choice.memory
    work = Workload(config, choice.layout, cluster)
    return {
        "layout": config.layout.model_dump(),
        "dp": choice.layout.dp,
        "micro_batch_size": config.train.micro_batch_size,
        "recompute": config.train.recompute,
        "recompute_modules": config.train.recompute_modules,
        "memory_bytes": {**vars(memory), "total_bytes": memory.total_bytes},
        "step_seconds": {**cost.time.parts(), "total": cost.time.total},
        "bubble_share": cost.bubble_share,
        "nvlink_bytes": cost.sent.nvlink_bytes,
        "network_bytes": cost.sent.network_bytes,
        "mfu": step_mfu(work, cost.time.total),
        "tokens_per_second": work.tokens_of_step / cost.time.total,
    }


def nothing_fits(config: Config, result: SearchResult, num_gpus: int, memory_bytes: int) -> ConfigError:
    """Builds the error for a search without choices: names the closest one, and the memory that it lacks."""
    if result.closest is None:
        batch = config.train.global_batch_size
        fitting = next((count for count in range(num_gpus, 0, -1) if batch % count == 0), 1)
        larger = -(-batch // num_gpus) * num_gpus
        return ConfigError(
            f"no layout divides {counted(num_gpus, 'GPU')}, {counted(config.model.num_layers, 'layer')}, rows of "
            f"{counted(config.row_width, 'token')} and a global batch of {batch}: data parallelism must divide the "
            f"batch; use --global-batch-size {larger}, or --gpus {fitting}"
        )
    closest, usable = result.closest, memory_bytes * USABLE_MEMORY
    needed = closest.memory.total_bytes
    parts = _bytes_of(closest.memory)
    largest = max(parts, key=lambda name: parts[name])
    return ConfigError(
        f"nothing fits {counted(num_gpus, 'GPU')} with {usable / GIB:.1f} usable GiB each: the closest layout is "
        f"{closest.layout} with micro-batch {closest.config.train.micro_batch_size} and everything recomputed, which "
        f"needs {needed / GIB:.1f} GiB, {(needed - usable) / GIB:.1f} too many; the largest part is {largest} "
        f"({parts[largest] / GIB:.1f} GiB): use {_remedy(largest)}"
    )


def _remedy(largest: str) -> str:
    if largest == "activations":
        return "a shorter data.seq_length, more GPUs, or GPUs with more memory"
    return "more GPUs, GPUs with more memory, or adapters instead of all weights (docs/training/lora.md)"


_MACHINE = re.compile(r"^# GPUs: (\d+) x (\w+) (\d+(?:\.\d+)?) ?Gi?B\b", re.MULTILINE)
"""Line that states the machine; GB means GiB here, since data sheets write GB."""
_HEAD_BYTES = 4096


class StatedMachine(NamedTuple):
    """Machine in a line such as `# GPUs: 64 x h100 80 GiB`."""

    num_gpus: int
    memory_bytes: int
    gpu: str


def stated_machine(paths: Iterable[Path]) -> StatedMachine | None:
    """Reads the machine from the last file that states one; None if none does."""
    machine = None
    for path in paths:
        if path.is_file():
            with disk_faults(f"read {path}"), path.open("rb") as file:
                match = _MACHINE.search(file.read(_HEAD_BYTES).decode(errors="replace"))
            if match is not None:
                machine = StatedMachine(int(match[1]), int(float(match[3]) * GIB), match[2])
    return machine


_CHOSEN = ("micro_batch_size", "recompute", "recompute_modules", "recompute_layers")
"""Keys of `train` that a plan chooses in addition to `layout`; all other keys are the user's."""


def write_choice(
    choice: Choice, sections: Mapping[str, Any], missing: Sequence[str], cluster: Cluster, memory_bytes: int, path: Path
) -> None:
    """Writes the user's sections with the chosen keys to a new file.

    Args:
        sections: The user's sections.
        missing: Keys that a run also needs, named in a comment.

    Raises:
        ConfigError: The file exists.
    """
    if path.exists():
        raise ConfigError(f"{path} already exists; name another file, or move it away")
    head = (
        f"# GPUs: {choice.layout.world_size} x {cluster.gpu.name} {memory_bytes / GIB:.4g} GiB\n"
        f"# {choice.layout}: {choice.memory.total_bytes / GIB:.1f} GiB on the heaviest rank; predicted by mtrain plan: "
        f"{choice.cost.time.total:.3f} s a step, MFU {_mfu(choice, cluster):.1%}\n"
    )
    if cluster.links is not None:
        head += f"# links in a node: {cluster.links}\n"
    if missing:
        head += f"# a run also needs {', '.join(missing)}\n"
    write_atomically(path, head + yaml_text(chosen_content(choice, sections)))


def chosen_content(choice: Choice, user_sections: Mapping[str, Any]) -> dict[str, Any]:
    layout = choice.config.layout.model_dump(exclude_defaults=True)
    gone = (*_CHOSEN, *(OVERLAPS if choice.layout.shard == "weights" else ()))
    unchanged = {key: value for key, value in user_sections["train"].items() if key not in gone}
    train = {**choice.config.train.model_dump(include=set(_CHOSEN), exclude_defaults=True), **unchanged}
    sections = {**user_sections, "layout": layout, "train": train}
    return {name: sections[name] for name in sections if name != "layout" or layout}
