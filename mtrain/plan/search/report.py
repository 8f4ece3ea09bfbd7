"""Results of a search, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.train import TrainSection
from mtrain.plan.search.cost import step_mfu
from mtrain.plan.search.hardware import GIB, USABLE_MEMORY, Cluster
from mtrain.plan.search.layer_cost import Workload
from mtrain.plan.search.search import Choice, Found

_GB = 10**9
_NAMES = {
    "matrices": "products of matrices",
    "attention": "attention",
    "elementwise": "elementwise kernels",
    "recompute": "recomputation",
    "tp": "tensor-parallel transfers",
    "cp": "context-parallel transfers",
    "ep": "transfers of tokens to experts",
    "p2p": "transfers between stages",
    "bubble": "the pipeline's bubble",
    "dp": "sums of gradients that nothing hides",
    "update": "the update",
}
_HEADER = ("", "layout", "micro-batch", "recompute", "GiB", "bubble", "NVLink GB", "network GB", "step s", "MFU")


def recompute_name(train: TrainSection) -> str:
    if train.recompute_modules is None:
        return train.recompute + ("" if train.recompute_layers is None else f" {train.recompute_layers}")
    return "+".join(train.recompute_modules)


def lines(found: Found, num_gpus: int, cluster: Cluster, memory_bytes: int) -> Iterator[str]:
    """Yields the lines of the table, and why the first row comes first."""
    gpu = cluster.gpu
    yield (
        f"{num_gpus} x {gpu.name} of {memory_bytes / GIB:.0f} GiB, {cluster.gpus_per_node} a node: "
        f"{gpu.flops / 1e12:.0f} TFLOP/s, NVLink {gpu.nvlink_bandwidth / _GB:.0f} GB/s, network "
        f"{gpu.network_bandwidth / _GB:.0f} GB/s a GPU; the estimate may fill {USABLE_MEMORY:.0%} of the memory"
    )
    counts = found.counts
    yield f"{counts.bounded:,} layouts, {counts.tried:,} not excluded by a bound, {counts.measured:,} memory estimates"
    yield ""
    rows = [_HEADER, *(_row(number, each, cluster) for number, each in enumerate(found.choices, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        left = [text.ljust(width) if column in (1, 3) else text.rjust(width) for column, (text, width) in
                enumerate(zip(row, widths))]  # fmt: skip
        yield "  ".join(left).rstrip()
    yield ""
    yield from _explained(found.choices)


def _row(number: int, choice: Choice, cluster: Cluster) -> tuple[str, ...]:
    cost = choice.cost
    return (
        str(number),
        str(choice.layout),
        str(choice.config.train.micro_batch_size),
        recompute_name(choice.config.train),
        f"{choice.memory.total_bytes / GIB:.1f}",
        f"{cost.bubble_share:.1%}",
        f"{cost.nvlink_bytes / _GB:.1f}",
        f"{cost.network_bytes / _GB:.1f}",
        f"{cost.time.total:.3f}",
        f"{step_mfu(Workload(choice.config, choice.layout, cluster), cost.time.total):.1%}",
    )


def _explained(choices: list[Choice]) -> Iterator[str]:
    """Yields what each alternative costs compared with the first."""
    first = choices[0]
    parts = first.cost.time.parts()
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    shares = ", ".join(f"{_NAMES[name]} {parts[name] / first.cost.time.total:.0%}" for name in largest)
    memory = first.memory
    of_memory = ", ".join(
        f"{name} {count / GIB:.1f}"
        for name, count in (
            ("weights", memory.weights_bytes),
            ("gradients", memory.gradients_bytes),
            ("optimizer", memory.optimizer_bytes),
            ("activations", memory.activations_bytes),
        )
    )
    yield f"1 spends its step on {shares}; GiB of its heaviest rank: {of_memory}."
    for number, other in enumerate(choices[1:], 2):
        more = {name: seconds - parts[name] for name, seconds in other.cost.time.parts().items()}
        slower = other.cost.time.total / first.cost.time.total - 1
        yield f"{number} is {slower:.1%} slower: {_difference(more)}."


def _difference(more: dict[str, float]) -> str:
    """Names the component that costs most in addition, and the one that saves most."""
    worst = max(more, key=lambda name: more[name])
    best = min(more, key=lambda name: more[name])
    text = f"{more[worst]:.3f} s more for {_NAMES[worst]}"
    return text if more[best] > -5e-4 else f"{text}, {-more[best]:.3f} s less for {_NAMES[best]}"


def as_json(found: Found, cluster: Cluster) -> dict[str, Any]:
    """Returns the results for programs: seconds, bytes and shares."""
    return {
        "counts": vars(found.counts),
        "gpu": vars(cluster.gpu),
        "choices": [_plain(each, cluster) for each in found.choices],
        "closest": None if found.closest is None else _plain(found.closest, cluster),
    }


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
        "nvlink_bytes": cost.nvlink_bytes,
        "network_bytes": cost.network_bytes,
        "mfu": step_mfu(work, cost.time.total),
        "tokens_per_second": work.tokens_of_step / cost.time.total,
    }


def nothing_fits(config: Config, found: Found, num_gpus: int, memory_bytes: int) -> ConfigError:
    """Builds the error that names the closest choice, and what it lacks."""
    if found.closest is None:
        batch = config.train.global_batch_size
        fitting = next((count for count in range(num_gpus, 0, -1) if batch % count == 0), 1)
        larger = -(-batch // num_gpus) * num_gpus
        return ConfigError(
            f"no layout divides {num_gpus} GPUs, {config.model.num_layers} layers, rows of {config.row_width} tokens "
            f"and a global batch of {batch}: data parallelism has to divide the batch; take --global-batch-size "
            f"{larger}, or --gpus {fitting}"
        )
    closest, usable = found.closest, memory_bytes * USABLE_MEMORY
    needed = closest.memory.total_bytes
    parts = {
        "weights": closest.memory.weights_bytes,
        "gradients": closest.memory.gradients_bytes,
        "optimizer": closest.memory.optimizer_bytes,
        "activations": closest.memory.activations_bytes,
    }
    largest = max(parts, key=lambda name: parts[name])
    return ConfigError(
        f"nothing fits: of {num_gpus} GPUs with {usable / GIB:.1f} GiB to use each, the closest layout is "
        f"{closest.layout} with micro-batch {closest.config.train.micro_batch_size} and everything recomputed, which "
        f"needs {needed / GIB:.1f} GiB, {(needed - usable) / GIB:.1f} too many; most of it are {largest} "
        f"({parts[largest] / GIB:.1f} GiB): take {_remedy(largest)}"
    )


def _remedy(largest: str) -> str:
    if largest == "activations":
        return "a shorter data.seq_length, more GPUs, or GPUs with more memory"
    return "more GPUs, GPUs with more memory, or adapters in the place of all weights (docs/training/lora.md)"
