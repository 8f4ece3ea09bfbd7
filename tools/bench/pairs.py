"""Time that loss pairs add to a training step, and megatron-core's own normalisation: `python tools/bench/pairs.py`.

All contenders get the sum of losses and the number of tokens of each microbatch, which they need alike, and end with a
factor for the gradients on every rank and the gradient norm on every host. The pass over the gradients, the same for
all, is left out.

- "norm": a step without normalisation. One all-reduce of the squared norm over all ranks, one read. It is in
  all others as well, so that their steps start with synchronized ranks, and what they ADD to it is compared.
- "normalisation": megatron-core's. An int32 count of each microbatch; after the last one a broadcast over the pipeline,
  an all-reduce over DP x CP, a branch on the host. (megatron-core 0.16.1, pipeline_parallel/schedules.py,
  `forward_step_calc_loss`, and distributed/finalize_model_grads.py, `finalize_model_grads`.) No loss to log.
- "with report": the same, and the losses. Megatron-LM core_v0.16.1 stacks a loss and a count in each microbatch
  (pretrain_gpt.py, `loss_func`) and sums them over DP x CP on the last stage, one all-reduce for each logged key
  (megatron/training/training.py, `train_step`). It reads them at each logging interval; here never.
- "ours": a pair of each microbatch, added up on the device, that travels in the norm's all-reduce and read, with the
  planned denominators and a flag. Terms of several denominators ("apart") cost an all-reduce of the plan; it runs
  during the first forward pass, which is not here to hide it. megatron-core has nothing to compare that with.

A second table shows what the collectives cost by themselves.

Rounds of all alternate in one run on the same ranks. What a contender adds is its time less that of "norm" in the same
round; columns show the median over rounds, and ratios of these medians, on the rank where ours is worst.
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

from mtrain.arch.layout import Layout
from mtrain.core.engine.loss_reduction import GlobalTotals, PairAccumulator, StepSums, sum_planned
from mtrain.core.loss.objective import side_term_factors
from mtrain.core.loss.pair import LossPair
from mtrain.core.ranks.all_reduce import AsyncAllReduce
from mtrain.core.ranks.groups import Groups
from mtrain.verify.core.ranks import Pool

NUM_MICROBATCHES = 8
TERMS = ("main", "z", "kl")
LAYOUTS = [Layout(), Layout(dp=2), Layout(pp=2), Layout(dp=4), Layout(pp=2, dp=2)]


class Added(NamedTuple):
    """Times that are added to the wall time of a step with a gradient norm, in milliseconds."""

    norm_ms: float
    """Time of the step itself."""
    normalisation_ms: float
    with_report_ms: float
    ours_ms: float


class Microbatch(NamedTuple):
    """Values that the loss of every microbatch has computed."""

    sums: list[Tensor]
    """Sum of each term, float32 scalar with a graph."""
    num_tokens: Tensor
    """Number of tokens, float64 scalar."""
    squares: Tensor
    """Part of the squared norm on this rank, float64 scalar."""


Contender = Callable[[Groups, Microbatch], None]


def measure(groups: Groups, num_terms: int, is_apart: bool, num_rounds: int, steps_a_round: int) -> Added:
    """Measures rounds of all contenders in turn, on all ranks at once."""
    contenders: list[Contender] = [
        norm_alone,
        megatrons_way,
        functools.partial(megatrons_way, reports=True),
        functools.partial(with_pairs, is_apart=is_apart),
    ]
    sums = [(torch.rand(4).requires_grad_() * 2).sum() for _ in range(num_terms)]
    microbatch = Microbatch(sums, *torch.tensor([1024.0, 2.0], dtype=torch.float64))
    rounds = [
        [_milliseconds(functools.partial(contender, groups, microbatch), steps_a_round) for contender in contenders]
        for _ in range(num_rounds + 1)
    ][1:]  # the first round warms up
    differences = ([norm, *(each - norm for each in others)] for norm, *others in rounds)
    return Added(*map(statistics.median, zip(*differences)))


def measure_collectives(groups: Groups, num_rounds: int, steps_a_round: int) -> list[float]:
    """Returns median milliseconds of an all-reduce of one number, of five, and of our own sum of five, as in a step."""
    one, vector = torch.zeros(1), torch.zeros(5, dtype=torch.float64)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(one),
        lambda: dist.all_reduce(vector),
        lambda: AsyncAllReduce(vector).get(),
    ]
    rounds = [[_milliseconds(call, steps_a_round) for call in calls] for _ in range(num_rounds)]
    return list(map(statistics.median, zip(*rounds)))


def _milliseconds(call: Callable[[], object], repetitions: int) -> float:
    """Returns the milliseconds of one call; all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        call()
    return 1e3 * (time.perf_counter() - start) / repetitions


def norm_alone(groups: Groups, microbatch: Microbatch) -> None:
    """Computes the norm as megatron-core does: one number over all ranks that hold different gradients, one read."""
    square = microbatch.squares.float()
    dist.all_reduce(square)
    _ = square.item()


def megatrons_way(groups: Groups, microbatch: Microbatch, reports: bool = False) -> None:
    """Runs one step's counts, reports, collectives and branch, then the norm."""
    total_tokens = torch.zeros([], dtype=torch.int32)
    is_last = groups.pp_rank == groups.layout.pp - 1
    reported: list[list[Tensor]] = []
    for _ in range(NUM_MICROBATCHES):
        num_tokens = torch.zeros([], dtype=torch.int32)
        if is_last:
            num_tokens = microbatch.num_tokens.to(torch.int32)
            if reports:
                reported.append([torch.cat([each.detach().view(1), num_tokens.view(1)]) for each in microbatch.sums])
        total_tokens += num_tokens
    pp = groups.collection.pp
    dist.broadcast(total_tokens, dist.get_process_group_ranks(pp)[-1], group=pp)
    dist.all_reduce(total_tokens, group=groups.dp_cp)
    if total_tokens > 0:
        _ = 1.0 / total_tokens
    norm_alone(groups, microbatch)
    for of_key in zip(*reported):
        summed = torch.vstack(of_key).sum(dim=0)
        dist.all_reduce(summed, group=groups.dp_cp)
        _ = summed[0] / summed[1]


def with_pairs(groups: Groups, microbatch: Microbatch, is_apart: bool) -> None:
    """Runs one step's pairs and the norm, with their collective and read."""
    terms = TERMS[: len(microbatch.sums)]
    planned = [1.0] * len(terms)
    plan = sum_planned(planned, groups, everywhere=False) if is_apart else None
    accumulator = PairAccumulator(terms, groups.device)
    if groups.pp_rank == groups.layout.pp - 1:
        for _ in range(NUM_MICROBATCHES):
            accumulator.add(
                {term: LossPair(value, microbatch.num_tokens) for term, value in zip(terms, microbatch.sums)}
            )
        if plan is not None:
            side_term_factors(plan.get(), dict.fromkeys(terms, 1.0))
    if plan is not None:
        plan.get()
    sums = StepSums(accumulator, dict.fromkeys(terms, 1.0))
    totals = GlobalTotals(sums, groups, local_grad_norm_sq=microbatch.squares)
    denominator = totals.main_denominator()
    _ = torch.where(denominator == 0, 0.0, 1.0 / denominator)
    totals.read(dict.fromkeys(terms, 1.0))


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each contender.")] = 60,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a round.")] = 20,
) -> None:
    """Prints one row for each number of ranks and terms."""
    pool = Pool()
    print(
        "| ranks | terms | norm, ms | + normalisation | + with report | + ours | ours / normalisation | / with report |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        for num_terms, is_apart in ((1, False), (len(TERMS), False), (len(TERMS), True)):
            reports = pool.run(measure, layout, num_terms, is_apart, rounds, steps)
            added = max(reports, key=lambda each: each.ours_ms / each.normalisation_ms)  # the worst rank
            times = " | ".join(f"{milliseconds:.3f}" for milliseconds in added)
            ratios = " | ".join(f"{added.ours_ms / theirs:.2f}" for theirs in added[1:3])
            terms = f"{num_terms}{', apart' if is_apart else ''}"
            print(f"| {layout.world_size} ({layout}) | {terms} | {times} | {ratios} |", flush=True)
    print("\n| ranks | all-reduce of 1 number, ms | all-reduce of 5 | sum of 5 here |\n|---|---|---|---|")
    for num_ranks in (2, 4, 8):
        times = " | ".join(
            f"{each:.3f}" for each in pool.run(measure_collectives, Layout(dp=num_ranks), rounds, steps)[0]
        )
        print(f"| {num_ranks} | {times} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
