"""Bandwidth of a node's links: times of collectives, and the bandwidth and latency of the cost model that fit them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple, assert_never, get_args

import numpy as np
import torch
import torch.distributed as dist

from mtrain.core.ranks.groups import Groups
from mtrain.plan.search.hardware import (
    GPUS,
    Cluster,
    Collective,
    Group,
    MeasuredLinks,
    MeasuredTransfer,
    Pair,
    Transfer,
    exchanged,
    gathered,
    known_gpu,
    reduced,
    sent,
)
from mtrain.verify.machine.collectives import exchange, run
from mtrain.verify.planted.inject import SLOW_LINK

SLOW = 2.0
"""A link is slow if a message takes this many times as long as over the fastest link."""
_DELAY_S = 0.3
_WARM_UP = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class LinksJob:
    """Transfers to time."""

    sizes: Sequence[int]
    """Bytes of the whole tensor of a rank."""
    repeats: int
    """Number of measurements of each transfer."""
    calls: int
    """Number of calls of a collective in one measurement."""
    fault: str | None = None


class Times(NamedTuple):
    """Times on one rank, in seconds."""

    collectives: dict[tuple[Collective, int], list[float]]
    """Keys are a collective and the bytes of the whole tensor."""
    pairs: dict[tuple[int, int], list[float]]
    """Keys are source and target; this rank is one of the two."""


def time_links(groups: Groups, job: LinksJob) -> Times:
    """Times every collective over the world, and messages between any two ranks."""
    count, device = groups.layout.world_size, groups.device
    collectives: dict[tuple[Collective, int], list[float]] = {}
    for collective in get_args(Collective):
        for size in job.sizes:
            part = size // _FLOAT_BYTES // count
            tensor = torch.zeros(part if collective == "all_gather" else part * count, device=device)

            def call() -> object:
                return run(collective, tensor, dist.group.WORLD)  # noqa: B023 - called before the next one

            collectives[collective, size] = _seconds(call, device, job.repeats, job.calls)
    message, pairs = torch.zeros(max(job.sizes) // _FLOAT_BYTES // count, device=device), {}
    for source, target in permutations(range(count), 2):

        def send() -> None:
            if groups.rank == source:  # noqa: B023 - called before the next one
                if (job.fault, source, target) == (SLOW_LINK.name, 0, 1):  # noqa: B023
                    time.sleep(_DELAY_S)
                exchange([dist.P2POp(dist.isend, message, target)])  # noqa: B023
            elif groups.rank == target:  # noqa: B023
                exchange([dist.P2POp(dist.irecv, message, source)])  # noqa: B023

        seconds = _seconds(send, device, job.repeats, 1)
        if groups.rank in (source, target):
            pairs[source, target] = seconds
    return Times(collectives, pairs)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int, calls: int) -> list[float]:
    """Returns the seconds of one call, `repeats` times."""
    seconds = []
    for number in range(_WARM_UP + repeats):
        _wait_for(device)
        dist.barrier()
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait_for(device)
        if number >= _WARM_UP:
            seconds.append((time.perf_counter() - start) / calls)
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predicted(collective: Collective, cluster: Cluster, num_ranks: int, num_bytes: float) -> Transfer:
    """Predicts a transfer over all ranks of a node as `mtrain plan` does."""
    group = Group(num_ranks, 1)
    match collective:
        case "all_reduce":
            return reduced(cluster, group, num_bytes)
        case "reduce_scatter" | "all_gather":
            return gathered(cluster, group, num_bytes)
        case "all_to_all":
            return exchanged(cluster, group, num_bytes)
        case "send_recv":
            return sent(cluster, 1, num_bytes)
        case _:
            assert_never(collective)


def measured_links(ranks: Sequence[Times], job: LinksJob, created: str, device: str) -> MeasuredLinks:
    """Combines the times of all ranks; a collective takes as long as on the slowest rank."""
    count, known = len(ranks), known_gpu(device)
    transfers, pairs = [], []
    for (collective, size), repeats in ranks[0].collectives.items():
        seconds = [max(rank.collectives[collective, size][number] for rank in ranks) for number in range(len(repeats))]
        assumed = None if known is None else predicted(collective, Cluster(known, count), count, size).seconds
        transfers.append(MeasuredTransfer(collective, size, statistics.median(seconds), assumed))
    num_bytes = max(job.sizes) // count
    for source, target in permutations(range(count), 2):
        # other work on the machine only adds time
        pairs.append(Pair(source, target, num_bytes, min(ranks[target].pairs[source, target])))
    bandwidth, latency_s = fitted(transfers, count)
    return MeasuredLinks(created, device, count, bandwidth, latency_s, tuple(transfers), tuple(pairs))


def fitted(transfers: Sequence[MeasuredTransfer], num_ranks: int) -> tuple[float, float]:
    """Returns the bandwidth in bytes per second and the latency in seconds that fit the cost model to the times, by
    least squares of relative errors."""
    # the model is linear in latency and 1 / bandwidth, so two unit clusters give its coefficients
    unit = Cluster(replace(GPUS["h100"], nvlink_bandwidth=1.0), num_ranks, 1.0, nvlink_latency_s=0.0)
    endless = Cluster(replace(GPUS["h100"], nvlink_bandwidth=float("inf")), num_ranks, 1.0, nvlink_latency_s=1.0)
    rows = [
        [predicted(each.collective, cluster, num_ranks, each.num_bytes).seconds / each.seconds for each in transfers]
        for cluster in (unit, endless)
    ]
    ones = np.ones(len(transfers))
    (per_byte, latency_s), *_ = np.linalg.lstsq(np.array(rows).T, ones)
    if latency_s < 0 or per_byte <= 0:  # times hardly depend on the size, or grow more than in proportion
        latency_s, per_byte = 0.0, np.linalg.lstsq(np.array(rows[:1]).T, ones)[0][0]
    return float(1 / per_byte), float(latency_s)


def slow_pairs(links: MeasuredLinks) -> list[Pair]:
    """Returns the links that take SLOW times as long as the fastest."""
    fastest = min(pair.seconds for pair in links.pairs)
    return [pair for pair in links.pairs if pair.seconds > SLOW * fastest]


def link_lines(links: MeasuredLinks) -> Iterator[str]:
    """Yields lines with the measurements, each next to the assumption of `mtrain plan`, and with the slow links."""
    known = known_gpu(links.device)
    yield str(links)
    if known is not None:
        cluster = Cluster(known)
        bandwidth, latency_s = known.nvlink_bandwidth * cluster.link_efficiency, cluster.nvlink_latency_s
        yield f"mtrain plan assumes for a {known.name}: {bandwidth / 1e9:.3g} GB/s, after {latency_s * 1e6:.3g} us"
    for transfer in links.transfers:
        assumed = "no assumption" if transfer.assumed_s is None else f"assumed {transfer.assumed_s * 1e3:.3g} ms"
        yield (
            f"{transfer.collective} of {transfer.num_bytes / 1e6:.3g} MB: {transfer.seconds * 1e3:.3g} ms, "
            f"{transfer.num_bytes / transfer.seconds / 1e9:.3g} GB/s of the tensor, {assumed}"
        )
    fastest = min(transfer.seconds for transfer in links.pairs)
    for pair in slow_pairs(links):
        yield (
            f"slow link: a message from rank {pair.source} to rank {pair.target} takes {pair.seconds / fastest:.1f} "
            f"times as long as over the fastest link ({pair.num_bytes / pair.seconds / 1e9:.3g} GB/s)"
        )
