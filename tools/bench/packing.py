"""Packing of samples into rows, and of rows to ranks: `python tools/bench/packing.py`.

First table: contenders put documents of log-normal length into rows. Each returns which documents share a row.

- "by groups": `mtrain.data.packing`, which handles equal lengths together.
- "one by one": best-fit-decreasing as in textbooks; the fullest row that takes a document is found by
  bisection in the sorted list of free spaces.
- "TRL": `trl.pack_dataset(strategy="bfd")` on all documents at once. It packs the tokens, too; they have one byte
  here, so that copying them counts little. Left out, with a line that says so, where trl is not installed.

Rounds of all alternate in one process; a row of the table shows the best round in samples per second of CPU time, which
a busy machine changes less than the median, and how many times faster ours is. The contenders other than ours get fewer
documents, as their rate does not grow with them.

Second table: the work of the rank with the most over the mean of all ranks, for 64 ranks with 8 full rows each. "in
turn" deals the rows as they come, "sorted" sorts them by cost and deals each turn to the ranks with the least work, as
where ranks wait for each other in every turn. Rows are 32k wide, as the longest document is; work is
6 x hidden_size x length + length^2 of each document.

Third table: a simulated 1F1B pipeline whose microbatches differ in cost (backward costs twice forward, sending none),
its time over that of its work alone: microbatches in random order, sorted, and from cheap to expensive to cheap.
"""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import path as import_path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.data.packing.step_plan import costs, dealt, packed

LONGEST = 32768
NUM_RANKS, ROWS_A_RANK = 64, 8

Packer = Callable[[NDArray[np.int64], int], int]
"""Function of the lengths and the width of a row that returns the number of rows."""


class Case(NamedTuple):
    """Documents and rows of one case."""

    median: int
    """Median number of tokens of a document; the logarithm has a standard deviation of 1."""
    row_width: int


CASES = [Case(500, 4096), Case(500, 8192), Case(800, 32768), Case(2000, 131072)]
PIPELINES = ((2, 8), (4, 8), (4, 16), (8, 16))
MEDIANS, HIDDEN_SIZES = (1000, 2000, 4000, 8000), (2048, 4096, 8192)


def documents(median: int, count: int, longest: int) -> NDArray[np.int64]:
    """Draws [count] lengths."""
    drawn = np.random.default_rng(median).lognormal(np.log(median), 1.0, count)
    return drawn.astype(np.int64).clip(1, longest)


def by_groups(lengths: NDArray[np.int64], row_width: int) -> int:
    """Packs with this package."""
    return len(packed(lengths, row_width).ends)


def one_by_one(lengths: NDArray[np.int64], row_width: int) -> int:
    """Packs by best-fit-decreasing, as in textbooks."""
    rows: list[list[int]] = []
    of_space: dict[int, list[list[int]]] = {}
    spaces: list[int] = []  # free spaces that some row has, sorted
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            row: list[int] = []
            space = row_width
            rows.append(row)
        else:
            space = spaces[place]
            row = of_space[space].pop()
            if not of_space[space]:
                del spaces[place]
        row.append(sample)
        space -= length
        waiting = of_space.setdefault(space, [])
        if not waiting:
            bisect.insort(spaces, space)
        waiting.append(row)
    return len(rows)


def of_trl(lengths: NDArray[np.int64], row_width: int) -> int:
    """Packs with TRL, documents of one-byte tokens."""
    arrow, datasets, trl = (importlib.import_module(name) for name in ("pyarrow", "datasets", "trl"))
    ends = np.append(0, np.cumsum(lengths))
    tokens = arrow.ListArray.from_arrays(ends.astype(np.int32), np.zeros(ends[-1], np.int8))
    dataset: Any = datasets.Dataset(arrow.table({"input_ids": tokens}))
    return len(trl.pack_dataset(dataset, row_width, map_kwargs={"batch_size": len(lengths), "keep_in_memory": True}))


def rates(case: Case, contenders: dict[str, Packer], counts: dict[str, int], rounds: int) -> list[str]:
    """Returns a cell for each contender: fill and rate."""
    samples = {name: documents(case.median, counts[name], min(LONGEST, case.row_width)) for name in contenders}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    num_rows = {}
    for _ in range(rounds):
        for name, packer in contenders.items():
            start = time.process_time()
            num_rows[name] = packer(samples[name], case.row_width)
            seconds[name].append(time.process_time() - start)
    best = {name: len(samples[name]) / min(times) / 1e6 for name, times in seconds.items()}
    ours = next(iter(best.values()))
    fill = {name: samples[name].sum() / (num_rows[name] * case.row_width) for name in contenders}
    return [f"{fill[name]:.3%}, {rate:.2f} M/s ({ours / rate:.1f}x)" for name, rate in best.items()]


def imbalances(median: int, hidden_size: int) -> list[float]:
    """Returns the imbalance of rows in turn, sorted, and dealt by this package."""
    lengths = documents(median, 400_000, LONGEST)
    budget = 0.9995 * NUM_RANKS * ROWS_A_RANK * LONGEST
    lengths = lengths[: int(np.searchsorted(lengths.cumsum(), budget))]
    rows = packed(lengths, LONGEST)
    row_costs = np.array([costs(lengths[rows.of(row)], hidden_size).sum() for row in range(len(rows.ends))])
    in_turn = np.resize(np.random.default_rng(0).permutation(len(row_costs)), (ROWS_A_RANK, NUM_RANKS))
    turns = [
        in_turn,
        *(dealt(row_costs, -(-len(row_costs) // NUM_RANKS), NUM_RANKS, wait) for wait in (True, False)),
    ]
    loads = [np.append(row_costs, 0)[each].sum(axis=0) for each in turns]
    return [float(each.max() / each.mean()) for each in loads]


def pipeline_time(forward_costs: Sequence[float], num_stages: int) -> float:
    """Simulates one step under 1F1B and returns its time."""
    ready: dict[tuple[str, int, int], float] = {}
    waiting = [one_f_one_b(len(forward_costs), num_stages - stage - 1) for stage in range(num_stages)]
    clocks = [0.0] * num_stages
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                kind, number = passes[0]
                before = stage - 1 if kind == "forward" else stage + 1
                if 0 <= before < num_stages and (kind, number, before) not in ready:
                    break
                start = max(clocks[stage], ready.get((kind, number, before), 0.0))
                clocks[stage] = start + forward_costs[number] * (1 if kind == "forward" else 2)
                ready[kind, number, stage] = clocks[stage]
                passes.pop(0)
    return max(clocks)


def one_f_one_b(num_microbatches: int, num_warm_up: int) -> list[tuple[str, int]]:
    """Lists the passes of a stage in their order."""
    warm_up = min(num_warm_up, num_microbatches)
    passes = [("forward", number) for number in range(warm_up)]
    for number in range(num_microbatches - warm_up):
        passes += [("forward", number + warm_up), ("backward", number)]
    return passes + [("backward", number) for number in range(num_microbatches - warm_up, num_microbatches)]


def pipeline_times(num_stages: int, num_microbatches: int, repetitions: int = 200) -> list[float]:
    """Returns times relative to the work alone: random, sorted, ours; means over draws of full rows of 32k
    positions."""
    generator = np.random.default_rng(0)
    times = []
    for _ in range(repetitions):
        attention = generator.lognormal(0.0, 0.8, num_microbatches) * LONGEST**2 / 3
        dear_first = np.sort(6 * 4096 * LONGEST + attention)[::-1]
        ours = dear_first[dealt(dear_first.astype(np.int64), num_microbatches, 1, wait_in_turns=False)[:, 0]]
        orders = (generator.permutation(dear_first), dear_first, ours)
        times.append([pipeline_time(order.tolist(), num_stages) / (3 * dear_first.sum()) for order in orders])
    return [float(mean) for mean in np.mean(times, axis=0)]


def main(
    count: Annotated[int, typer.Option(min=1000, help="Documents for ours.")] = 1_000_000,
    others: Annotated[int, typer.Option(min=1000, help="Documents for the others.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each contender.")] = 5,
) -> None:
    """Prints the tables."""
    contenders: dict[str, Packer] = {"by groups": by_groups, "one by one": one_by_one}
    if importlib.util.find_spec("trl") is None:
        print("trl is not installed: left out")
    else:
        contenders["TRL"] = of_trl
    counts = dict.fromkeys(contenders, others) | {"by groups": count}
    print(f"| median tokens | row | {' | '.join(f'{name}: fill, samples per cpu-s' for name in contenders)} |")
    print("|---" * (2 + len(contenders)) + "|")
    for case in CASES:
        cells = rates(case, contenders, counts, rounds)
        print(f"| {case.median} | {case.row_width} | {' | '.join(cells)} |", flush=True)
    print("\n| median tokens | hidden size | in turn | sorted | ours |\n|---|---|---|---|---|")
    for median in MEDIANS:
        for hidden_size in HIDDEN_SIZES:
            cells = [f"{each:.4f}" for each in imbalances(median, hidden_size)]
            print(f"| {median} | {hidden_size} | {' | '.join(cells)} |", flush=True)
    print("\n| stages | microbatches | random | sorted | ours |\n|---|---|---|---|---|")
    for num_stages, num_microbatches in PIPELINES:
        cells = [f"{each:.3f}" for each in pipeline_times(num_stages, num_microbatches)]
        print(f"| {num_stages} | {num_microbatches} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
