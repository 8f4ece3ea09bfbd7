"""Measured properties of this machine for `mtrain plan`: a core as a device, and gloo as its links.

All times are processor seconds of one rank, so ranks that share cores can be predicted, too: of a product, of
attention, and of an all-gather, which costs a latency and bytes over a bandwidth. The rate at which other operations
move memory, and the host's time for each of them, are fitted to steps of one rank.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mtrain.core.ranks.groups import Groups
from mtrain.plan.search.cost import HALF_EFFICIENT
from mtrain.plan.search.hardware import GIB, Cluster, Gpu

ROUNDS = 5
SMALL, LARGE = 1024, 512 * 1024
"""Sizes of an all-gather, in numbers on each rank."""


class Core(NamedTuple):
    """Speed of one thread."""

    product_flops: float
    """Speed of a product [tokens, hidden] x [hidden, 2 hidden], in FLOP/s."""
    attention_flops: float
    """Speed of causal attention forward and backward, in FLOP/s as `mtrain plan` counts them: 3.5 times the forward
    pass."""


class Links(NamedTuple):
    """Speed of links between a number of ranks."""

    latency_s: float
    """Processor time of a short all-gather."""
    bandwidth: float
    """Number of bytes that a rank sends in a second of its processor time."""


NOBODY = Links(0.0, 1e12)
"""Links of a rank that has nobody to send to."""


def least_seconds(call: Callable[[], object], rounds: int, repeats: int = 10) -> float:
    """Returns the processor seconds of this process for one call, the least of some rounds."""
    found = []
    call()
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        found.append((time.process_time() - start) / repeats)
    return min(found)


def core(groups: Groups, tokens: int, seq: int, hidden: int, heads: int, rounds: int = ROUNDS) -> Core:
    """Measures a core on a rank, at the sizes of the model that is to be predicted."""
    one, other = torch.randn(tokens, hidden), torch.randn(hidden, 2 * hidden)
    product = 2 * tokens * hidden * 2 * hidden / least_seconds(lambda: one @ other, rounds)
    shape = (max(1, tokens // seq), heads, seq, hidden // heads)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def attend() -> None:
        torch.autograd.backward(F.scaled_dot_product_attention(query, key, value, is_causal=True).sum())

    pairs = shape[0] * seq * (seq + 1) / 2
    attention = 3.5 * 2 * 2 * hidden * pairs / least_seconds(attend, rounds)
    return Core(product, attention)


def links(groups: Groups, rounds: int = ROUNDS) -> Links:
    """Measures links on all ranks at once: the slowest counts."""
    seconds = []
    for count in (SMALL, LARGE):
        own, whole = torch.zeros(count), torch.zeros(count * groups.layout.world_size)
        seconds.append(least_seconds(functools.partial(dist.all_gather_into_tensor, whole, own), rounds))
    sent = 4 * (LARGE - SMALL) * (groups.layout.world_size - 1)
    found = torch.tensor([seconds[0], max(seconds[1] - seconds[0], 1e-9) / sent], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Links(found[0].item(), 1 / found[1].item())


def fitted(seconds: Callable[[float], float], measured_s: float) -> float:
    """Finds the rate at which a prediction, which falls with it, equals the measurement; or the nearest in 1 to
    1e13."""
    low, high = 1.0, 1e13
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    return high


class Fitted(NamedTuple):
    """Parameters that are chosen so that predictions for one rank are right."""

    memory_bandwidth: float
    """Number of bytes that other operations read and write in a second."""
    launch_s: float
    """Time that the host needs for an operation."""


def cluster(found: Core, between: Links, fit: Fitted, hidden: int) -> Cluster:
    """Describes the machine in the form of `mtrain plan`, with all ranks in one node."""
    gpu = Gpu(
        name="core",
        flops=found.product_flops,
        fp32_flops=found.product_flops,
        memory_bytes=GIB,
        memory_bandwidth=fit.memory_bandwidth,
        nvlink_bandwidth=between.bandwidth,
        network_bandwidth=between.bandwidth,
        # products of this width run as fast as measured; smaller ones are less efficient, as on other devices
        matrix_efficiency=(hidden + HALF_EFFICIENT) / hidden,
        attention_efficiency=found.attention_flops / found.product_flops,
    )
    return Cluster(
        gpu, gpus_per_node=1024, link_efficiency=1.0, nvlink_latency_s=between.latency_s, launch_s=fit.launch_s
    )
