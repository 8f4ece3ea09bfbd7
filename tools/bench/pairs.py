"""What loss pairs cost against megatron-core's own normalisation: `python tools/bench/pairs.py`.

Both contenders get the sum of losses and the number of tokens of each microbatch, which both need alike, and end with a
factor for the gradients on every rank and a loss to log. The pass over the gradients is the same for both and left out.

- megatron-core's way, as its examples write it: a report and an int32 count of each microbatch; after the last one a
  broadcast of the count over the pipeline, an all-reduce over DP x CP, a branch on the host, and for each logged key
  another all-reduce and a read by the host. (megatron-core 0.16.1, schedules.py:218-308 and
  finalize_model_grads.py:475-497; the logging is the training loop's.)
- ours: a pair of each microbatch, added up on the device; one all-reduce of all pairs, one read. Terms of several
  denominators ("apart") cost a second all-reduce, of the plan; it runs beside the first forward pass, which is not here
  to hide it. megatron-core has nothing to compare that with.

Rounds of both alternate in one run on the same ranks. Ratios: of the medians and of the best rounds of wall time, and
of the CPU time of all ranks, which other programs on the machine disturb least.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from sys import path as import_path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

if __name__ == "__main__":
    import_path.insert(0, str(Path(__file__).parents[2]))

from mtrain.layout import Layout
from mtrain.loss.pair import LossPair
from mtrain.loss.terms import side_term_factors
from mtrain.mcore.groups import Groups
from mtrain.mcore.pairs import GlobalTotals, PairAccumulator, PlannedTotals
from mtrain.verify.ranks import Pool

NUM_MICROBATCHES = 8
TERMS = ("main", "z", "kl")
LAYOUTS = [Layout(), Layout(dp=2), Layout(pp=2), Layout(dp=4), Layout(pp=2, dp=2)]


class Ratios(NamedTuple):
    """Ours over megatron-core's."""

    median: float
    best: float
    cpu: float
    median_ms: float
    """Of ours."""


class Microbatch(NamedTuple):
    """What the loss of every microbatch has computed."""

    sums: list[Tensor]
    """Of each term, float32 scalar with a graph."""
    num_tokens: Tensor
    """float64 scalar."""


Contender = Callable[[Groups, Microbatch], None]


class Cost(NamedTuple):
    """Of a step on this rank."""

    seconds: float
    cpu_seconds: float


def measure(groups: Groups, num_terms: int, is_apart: bool, num_rounds: int, steps_a_round: int) -> Ratios:
    """Rounds of both in turn, on all ranks at once."""
    our_way: Contender = functools.partial(with_pairs, is_apart=is_apart)
    sums = [(torch.rand(4).requires_grad_() * 2).sum() for _ in range(num_terms)]
    microbatch = Microbatch(sums, torch.tensor(1024.0, dtype=torch.float64))
    costs: dict[Contender, list[Cost]] = {megatrons_way: [], our_way: []}
    for number in range(-1, num_rounds):
        for contender, found in costs.items():
            cost = _cost(contender, groups, microbatch, steps_a_round)
            if number >= 0:  # the first round warms up
                found.append(cost)
    theirs, ours = ([cost.seconds for cost in found] for found in costs.values())
    their_cpu, our_cpu = (_sum_over_ranks(sum(cost.cpu_seconds for cost in found)) for found in costs.values())
    median = statistics.median(ours)
    return Ratios(median / statistics.median(theirs), min(ours) / min(theirs), our_cpu / their_cpu, 1e3 * median)


def _cost(contender: Contender, groups: Groups, microbatch: Microbatch, steps: int) -> Cost:
    """All ranks start together."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender(groups, microbatch)
    return Cost((time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps)


def _sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def megatrons_way(groups: Groups, microbatch: Microbatch) -> None:
    """One step's counts, reports, collectives and reads."""
    total_tokens = torch.zeros([], dtype=torch.int32)
    is_last = groups.pp_rank == groups.layout.pp - 1
    reports: list[dict[int, Tensor]] = []
    for _ in range(NUM_MICROBATCHES):
        num_tokens = torch.zeros([], dtype=torch.int32)
        if is_last:
            num_tokens = microbatch.num_tokens.to(torch.int32)
            report = {
                key: torch.cat([value.detach().clone().view(1), num_tokens.view(1)])
                for key, value in enumerate(microbatch.sums)
            }
            reports.append(report)
        total_tokens += num_tokens
    pp = groups.collection.pp
    dist.broadcast(total_tokens, dist.get_process_group_ranks(pp)[-1], group=pp)
    dist.all_reduce(total_tokens, group=groups.dp_cp)
    if total_tokens > 0:
        _ = 1.0 / total_tokens
    for key in range(len(microbatch.sums) if is_last else 0):
        summed = torch.vstack([report[key] for report in reports]).sum(dim=0)
        dist.all_reduce(summed, group=groups.dp_cp)
        _ = (summed[0] / summed[1]).item()


def with_pairs(groups: Groups, microbatch: Microbatch, is_apart: bool) -> None:
    """One step's pairs, collectives and read."""
    terms = TERMS[: len(microbatch.sums)]
    planned = [1.0] * len(terms)
    plan = PlannedTotals(planned, groups) if is_apart else None
    accumulator = PairAccumulator(terms, groups.device)
    if groups.pp_rank == groups.layout.pp - 1:
        for _ in range(NUM_MICROBATCHES):
            accumulator.add(
                {term: LossPair(value, microbatch.num_tokens) for term, value in zip(terms, microbatch.sums)}
            )
        if plan is not None:
            side_term_factors(plan.on_device(), dict.fromkeys(terms, 1.0))
    if plan is not None:
        plan.on_device()
    totals = GlobalTotals(accumulator, planned, False, groups)
    denominator = totals.main_denominator()
    _ = torch.where(denominator == 0, 0.0, 1.0 / denominator)
    totals.read()


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each contender.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a round.")] = 40,
) -> None:
    """Prints one row for each number of ranks and terms."""
    pool = Pool()
    print("| ranks | terms | ours / megatron-core, median | best round | CPU time | ours, ms |")
    print("|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        for num_terms, is_apart in ((1, False), (len(TERMS), False), (len(TERMS), True)):
            reports = pool.run(measure, layout, num_terms, is_apart, rounds, steps)
            worst = max(reports, key=lambda report: report.median)
            row = f"{worst.median:.2f} | {worst.best:.2f} | {worst.cpu:.2f} | {worst.median_ms:.2f}"
            print(
                f"| {layout.world_size} ({layout}) | {num_terms}{', apart' if is_apart else ''} | {row} |", flush=True
            )


if __name__ == "__main__":
    typer.run(main)
