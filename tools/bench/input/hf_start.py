"""Speed of a start from a Hugging Face folder: `python tools/bench/input/hf_start.py FOLDER`.

A Llama-shaped model with random bfloat16 weights is written into FOLDER and deleted at the end. On one process and on
two ranks of tp and of pp, contenders take turns in one run: `model.hf` into a built model with its main weights in
float32; a plain read of as many bytes of the same files, each rank others, into existing memory; and the same read with
a second pass that copies them into float32 memory, which main weights need in any case. The files leave the page cache
before each. Figures are GB/s of a rank's own bytes in bfloat16, for the slowest rank, the best of all rounds, as others
may use the disk, too.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[3]))

from mtrain import load_config
from mtrain.arch.layout import Layout
from mtrain.checkpoint.state.start_weights import load_hf_weights
from mtrain.config import Config
from mtrain.core.loss.objective import Objective
from mtrain.core.ranks.groups import Groups
from mtrain.hf.io.safetensors import raw_bytes
from mtrain.training.build import build_step
from mtrain.verify.core.ranks import Pool
from tools.bench.convert import write_model

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2)]


class Speed(NamedTuple):
    """Seconds on one rank, the best of the rounds."""

    num_bytes: int
    """Size of its parameters in bfloat16."""
    start_s: float
    read_s: float
    filled_s: float


def measure(groups: Groups, folder: Path, config: Config, num_rounds: int) -> Speed:
    """Measures the three contenders in turn."""
    objective = Objective.from_config(config.loss, config.model)
    built = build_step(config, groups, objective, weights_follow=True)
    num_bytes = sum(each.numel() for chunk in built.model.chunks for each in chunk.parameters()) * 2
    read = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
    whole = torch.zeros(num_bytes // 2)

    def plain() -> None:
        _read(folder, read, groups.rank * num_bytes)

    def filled() -> None:
        _read(folder, read, groups.rank * num_bytes)
        whole.copy_(read)

    actions: list[Callable[[], None]] = [
        lambda: load_hf_weights(folder, built.model),
        plain,
        filled,
    ]
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(num_rounds):
        for action, found in zip(actions, seconds, strict=True):
            _forget(folder)
            dist.barrier()
            began = time.perf_counter()
            action()
            found.append(time.perf_counter() - began)
    return Speed(num_bytes, *(min(found) for found in seconds))


def _read(folder: Path, memory: torch.Tensor, skipped: int) -> None:
    """Fills the memory from after the skipped bytes: no rank finds another rank's bytes in the page cache."""
    left = raw_bytes(memory)
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        start, skipped = min(skipped, size), max(0, skipped - size)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while len(left) and (count := file.readinto(left)):
                left = left[count:]


def _forget(folder: Path) -> None:
    """Drops the files' clean pages from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(
    folder: Annotated[Path, typer.Argument(help="For the model.")],
    layers: Annotated[int, typer.Option(min=2, help="Each has 67 million parameters.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
) -> None:
    """Prints a table in Markdown."""
    folder.mkdir(parents=True)
    pool: Any = Pool()
    try:
        write_model(folder / "source", layers)
        settings = [f"model.hf={folder}/source", f"run.dir={folder}/run", "optimizer.lr=0.001"]
        settings += ["train={global_batch_size: 2, num_steps: 1, precision: bf16, device: cpu}"]
        config = load_config([], [*settings, "data={kind: mock, seq_length: 64}"])
        print("| layout | MB a rank | model.hf | plain read | read into float32 | of the read | of the second |")
        print("|---|---|---|---|---|---|---|")
        for layout in LAYOUTS:
            worst = max(pool.run(measure, layout, folder / "source", config, rounds), key=lambda one: one.start_s)
            rates = [f"{worst.num_bytes / seconds / 1e9:.2f} GB/s" for seconds in worst[1:]]
            parts = [f"{seconds / worst.start_s:.2f}" for seconds in (worst.read_s, worst.filled_s)]
            print(f"| {layout} | {worst.num_bytes / 1e6:.0f} | {' | '.join([*rates, *parts])} |")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)
