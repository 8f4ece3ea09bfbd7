"""Cost of a save next to the bare disk and megatron-core's own save: `python tools/bench/save.py`.

Contenders share one run, the same ranks and the same state (weights, float32 main weights and Adam's moments of a small
model, filled with random numbers); every rank starts a contender together and the slowest one counts. Ours takes turns
with raw and memcpy, and after that theirs with raw once more: theirs forks writers, after which the first write to each
page of the rank's memory, which is then shared with them, costs a page fault in any process.

- raw: each rank writes as many bytes as our file of that rank has, from memory, and waits for the disk (fsync).
- ours: everything that `Saver.save` and `wait` do: copy, files, BLAKE3, fsync, manifest, rename.
- copy: what training waits for in ours, next to the bare copy of the same tensors into existing memory.
- theirs: `dist_checkpointing.save` in `torch_dist`, parallel over data-parallel ranks, with its distribution kept from
  the first save; optimizer state in the form that can be resharded.

Best of several rounds; the first warms up. Files of earlier rounds are deleted outside the timer.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, NamedTuple

import psutil
import torch
import torch.distributed as dist
import typer
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.arch.layout import Layout
from mtrain.checkpoint.state.save import Saver
from mtrain.checkpoint.store.retention import Keep, Retention
from mtrain.config import Config
from mtrain.core.engine.rank_model import RankModel, build_rank_model
from mtrain.core.engine.training_state import local_shards
from mtrain.core.layers.build import unwrap
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.ranks import Pool

LAYOUTS = [Layout(), Layout(dp=2), Layout(tp=2, dp=2)]
_PIECE_BYTES = 1 << 23
_TIMEOUT_S = 900
"""Time limit of all rounds of a layout, also on a slow disk."""


class Seconds(NamedTuple):
    """Seconds of the best rounds, on the slowest rank."""

    raw: float
    """Time of the raw write in turns with ours."""
    ours: float
    memcpy: float
    copy: float
    first_copy: float
    """Time of the copy in the first save, which also waits for the rest of the memory to be allocated."""
    raw_and_theirs: float
    theirs: float


class Row(NamedTuple):
    """Result of one layout."""

    gigabytes: float
    """Amount that all ranks write together."""
    seconds: Seconds


def configured(num_layers: int, hidden_size: int) -> Config:
    """Makes the configuration of a model of 12 num_layers hidden_size**2 parameters and embeddings."""
    model = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "ffn_hidden_size": 4 * hidden_size,
        "num_attention_heads": 8,
        "vocab_size": 8192,
    }
    return Config.model_validate(
        {
            "run": {"dir": "unused"},
            "model": model,
            "train": {"global_batch_size": 4, "num_steps": 1, "precision": "bf16"},
            "optimizer": {"lr": 1e-3},
            "data": {"kind": "mock", "seq_length": 128},
            "layout": {},
            "checkpoint": {"keep_last": 1},
        }
    )


def measure(groups: Groups, config: Config, folder: Path, num_rounds: int) -> Row:
    """Measures all contenders in turn, on all ranks at once."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # theirs starts processes
    model = build_rank_model(config, groups)
    parts = local_shards(model)
    for part in parts:
        if part.data.is_floating_point():
            part.data.normal_()
    content = torch.cat([part.data.flatten().view(torch.uint8) for part in parts])
    memory = [torch.zeros_like(part.data) for part in parts]
    raw = functools.partial(_raw, folder / f"raw-{groups.rank}", content)
    saver = Saver(model, Retention(folder / "ours", Keep.of(config.checkpoint)))
    saver.expect()  # as training does after its first step
    rounds = list[list[float]]()
    for step in range(num_rounds + 1):
        columns = [raw(), _seconds(lambda: [one.copy_(part.data) for one, part in zip(memory, parts)])]
        rounds.append([*columns, *_ours(saver, step)])
    raw_best, memcpy, ours, copy = _best(rounds)
    first_copy = rounds[0][-1]
    theirs = _megatrons_save(model)
    rounds = [[raw(), _theirs(theirs, folder / f"theirs-{step}", groups)] for step in range(num_rounds + 1)]
    for child in psutil.Process().children(recursive=True):
        child.kill()  # their manager would outlive this process and keep its output open
    size = torch.tensor([content.numel()], dtype=torch.int64)
    dist.all_reduce(size)
    return Row(size.item() / 1e9, Seconds(raw_best, ours, memcpy, copy, first_copy, *_best(rounds)))


def _best(rounds: list[list[float]]) -> list[float]:
    """Returns the best of each column; the first round warms up."""
    return [min(column) for column in zip(*rounds[1:])]


def _raw(path: Path, content: torch.Tensor) -> float:
    seconds = _seconds(functools.partial(_write, path, content))
    path.unlink()
    return seconds


def _ours(saver: Saver, step: int) -> tuple[float, float]:
    """Returns the seconds until the save is on disk, and those that training waits."""
    dist.barrier()
    began = time.perf_counter()
    copy = _seconds(functools.partial(saver.save, step))
    saver.wait()
    ours = _slowest(time.perf_counter() - began)
    saver.confirm(step)  # so that the one before is deleted
    saver.finish()
    return ours, copy


def _theirs(save: Callable[[Path], None], folder: Path, groups: Groups) -> float:
    if groups.rank == 0:
        folder.mkdir()
    seconds = _seconds(functools.partial(save, folder))
    if groups.rank == 0:
        shutil.rmtree(folder)
    return seconds


def _megatrons_save(model: RankModel) -> Callable[[Path], None]:
    groups = model.groups
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), groups.dp_cp, do_cache_distribution=True
    )

    def save(folder: Path) -> None:
        weights = unwrap(model.chunks[0]).sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        state = {
            "model": weights,
            "optimizer": model.optimizer.inner.sharded_state_dict(
                weights, metadata={"distrib_optim_sharding_type": "fully_reshardable"}
            ),
        }
        dist_checkpointing.save(state, str(folder), strategy, validate_access_integrity=False)

    return save


def _write(path: Path, content: torch.Tensor) -> None:
    view = memoryview(content.numpy())  # type: ignore[arg-type]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for start in range(0, view.nbytes, _PIECE_BYTES):
        os.write(descriptor, view[start : start + _PIECE_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def _seconds(action: Callable[[], object]) -> float:
    """Measures an action on the slowest rank; all start together."""
    dist.barrier()
    began = time.perf_counter()
    action()
    return _slowest(time.perf_counter() - began)


def _slowest(seconds: float) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each contender.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 12,
    hidden: Annotated[int, typer.Option(min=64, help="Its hidden size.")] = 640,
    folder: Annotated[Path | None, typer.Option(help="Where to write; by default the system's temporary one.")] = None,
) -> None:
    """Prints one row for each number of ranks."""
    pool, config = Pool(timeout_s=_TIMEOUT_S), configured(layers, hidden)
    print("| ranks | GB | raw GB/s | ours / raw | torch_dist / raw | training waits / memcpy | first time |")
    print("|---|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            row = pool.run(measure, layout, config, Path(place), rounds)[0]
        seconds = row.seconds
        print(
            f"| {layout.world_size} ({layout}) | {row.gigabytes:.2f} | {row.gigabytes / seconds.raw:.2f} "
            f"| {seconds.raw / seconds.ours:.2f} | {seconds.raw_and_theirs / seconds.theirs:.2f} "
            f"| {seconds.copy / seconds.memcpy:.2f} | {seconds.first_copy / seconds.memcpy:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
