"""Cost of handing the weights to an inference engine: `python tools/bench/parts/weight_sync.py`.

Ranks of gloo hold a model in bf16. In turn in one run: every tensor whole on all ranks, on rank 0 alone, and a copy of
the same bytes in memory. Columns are GB/s of the bytes that come out, medians; the last one is the part of the copy's
speed that the first has. Adapters are not merged here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain.api.hf_tensors import HfTensors
from mtrain.arch.layout import Layout
from mtrain.config import Config
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.hf.io.broadcast import BUCKET_BYTES
from mtrain.training.build import build_step
from mtrain.verify.core.ranks import Pool
from tools.bench.parts.replicas import config_of

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2)]


class Speed(NamedTuple):
    """Seconds of all bytes on one rank, medians."""

    num_bytes: int
    everywhere_s: float
    first_s: float
    copy_s: float


def measure(groups: Groups, config: Config, num_rounds: int) -> Speed:
    """Measures the three in turn; planning is part of a sync."""
    built = build_step(config, groups, Objective.from_config(config.loss, config.model))

    def stream(everywhere: bool) -> Iterable[tuple[str, Tensor]]:
        planned = HfTensors(built.model, "merged")
        return planned.stream(BUCKET_BYTES, everywhere)

    own = [tensor for _, tensor in stream(True)]
    there = [torch.empty_like(tensor) for tensor in own]

    def copy() -> None:
        for source, target in zip(own, there, strict=True):
            target.copy_(source)

    def drain(everywhere: bool) -> None:
        for _ in stream(everywhere):
            pass

    actions: list[Callable[[], None]] = [lambda: drain(True), lambda: drain(False), copy]
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(num_rounds):
        for action, found in zip(actions, seconds, strict=True):
            dist.barrier()
            began = time.perf_counter()
            action()
            found.append(time.perf_counter() - began)
    everywhere_s, first_s, copy_s = (statistics.median(found) for found in seconds)
    return Speed(sum(tensor.nbytes for tensor in own), everywhere_s, first_s, copy_s)


def main(
    hidden_size: Annotated[int, typer.Option(help="Of the model.")] = 1024,
    num_layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    num_rounds: Annotated[int, typer.Option(help="Syncs of each kind.")] = 7,
) -> None:
    """Prints a table in Markdown."""
    pool: Any = Pool()
    config = config_of(hidden_size, num_layers)
    print("| layout | MB | all ranks | rank 0 | copy in memory | of the copy |\n|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        speeds = pool.run(measure, layout, config, num_rounds)
        worst = max(speeds, key=lambda speed: speed.everywhere_s)
        rates = [f"{worst.num_bytes / seconds / 1e9:.2f} GB/s" for seconds in worst[1:]]
        part = worst.copy_s / worst.everywhere_s
        print(f"| {layout} | {worst.num_bytes / 1e6:.0f} | {' | '.join(rates)} | {part:.0%} |")


if __name__ == "__main__":
    typer.run(main)
