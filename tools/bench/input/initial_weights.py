"""Speed of drawing initial weights, in GB of float32 per processor second: `tools/bench/input/initial_weights.py`.

- "bound": the generator alone, block by block into existing memory: the limit if every drawn value is kept.
- "whole": blocks joined to a whole tensor in float32, which is then copied into the parameter, as in 0.1.0.
- "ours": `draw` of `mtrain.core.layers.init_weights`, on one thread and on as many as a rank alone has cores.

Contenders take turns and must draw the same bits. Threads are for wall time: the last column.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from mtrain.base.environment import cores_of_rank
from mtrain.core.layers.init_weights import draw

_ROWS = 256
_DEVIATION = 0.02


def main(
    rows: Annotated[int, typer.Option(min=256, help="Of the tensor, a multiple of 256.")] = 8192,
    columns: Annotated[int, typer.Option(min=16)] = 2048,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    dtype: Annotated[str, typer.Option(help="Of the parameter.")] = "bfloat16",
) -> None:
    """Measures all contenders and prints a table."""
    target, gigabytes = torch.zeros(rows, columns, dtype=getattr(torch, dtype)), rows * columns * 4 / 1e9
    memory, cores = torch.zeros(_ROWS, columns), cores_of_rank(os.environ)

    def ours(threads: int) -> None:
        draw(target, "bench", (rows, columns), (0, 0), _DEVIATION, threads)

    contenders: dict[str, Callable[[], object]] = {
        "bound": lambda: [_block(memory, block) for block in range(rows // _ROWS)],
        "whole": lambda: _whole(target),
        "ours, 1 thread": lambda: ours(1),
        f"ours, {cores} threads": lambda: ours(cores),
    }
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    drawn = []
    for _ in range(rounds):
        for name, contender in contenders.items():
            target.zero_()
            processor, wall = time.process_time(), time.perf_counter()
            contender()
            seconds[name].append((time.process_time() - processor, time.perf_counter() - wall))
            if name != "bound":
                drawn.append(target.clone())
    assert all(torch.equal(one, drawn[0]) for one in drawn), "the contenders draw other values"
    print(f"{gigabytes:.2f} GB in float32, into {dtype}, {rounds} rounds")
    print(f"{'contender':<18} {'GB / cpu-s':>10} {'of bound':>9} {'median':>7} {'GB / s':>7}")
    bound = [processor for processor, _ in seconds["bound"]]
    for name, found in seconds.items():
        spent, passed = zip(*found)
        ratios = f"{min(bound) / min(spent):>9.2f} {statistics.median(bound) / statistics.median(spent):>7.2f}"
        print(f"{name:<18} {gigabytes / min(spent):>10.2f} {ratios} {gigabytes / min(passed):>7.2f}")


def _block(values: Tensor, block: int) -> Tensor:
    digest = hashlib.sha256(f"bench:{block}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return values.normal_(0.0, _DEVIATION, generator=generator)


def _whole(target: Tensor) -> None:
    blocks = [_block(torch.empty(_ROWS, target.shape[1]), block) for block in range(target.shape[0] // _ROWS)]
    target.copy_(torch.cat(blocks))


if __name__ == "__main__":
    typer.run(main)
