"""Time and bytes of transfers between ranks, by the alpha-beta model: a latency, and bytes over a bandwidth.

Ranks are numbered so that tp is innermost, then cp, then dp, then pp (mtrain/plan/layout.py). A group whose members lie
`stride` ranks apart fits into a node where stride x size does; else some of its members share a node, and together use
as many network cards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrain.plan.search.hardware import Cluster


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends, and the seconds that it takes."""

    seconds: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            self.seconds + other.seconds,
            self.nvlink_bytes + other.nvlink_bytes,
            self.network_bytes + other.network_bytes,
        )

    def __mul__(self, times: float) -> Transfer:
        return Transfer(self.seconds * times, self.nvlink_bytes * times, self.network_bytes * times)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other."""

    size: int
    stride: int
    """Distance of neighbours in the order of ranks."""

    def members_in_a_node(self, cluster: Cluster) -> int:
        """Counts the members of the group that share a node."""
        return max(1, min(self.size, cluster.gpus_per_node // self.stride))


def gathered(cluster: Cluster, group: Group, whole_bytes: float) -> Transfer:
    """Predicts an all-gather or a reduce-scatter of `whole_bytes` on each rank, in a ring."""
    if group.size == 1:
        return Transfer()
    sent = whole_bytes * (group.size - 1) / group.size
    local = group.members_in_a_node(cluster)
    if local == group.size:
        bandwidth = cluster.gpu.nvlink_bandwidth * cluster.link_efficiency
        return Transfer(cluster.nvlink_latency_s + sent / bandwidth, nvlink_bytes=sent)
    # the ring enters and leaves a node through all cards of its members there
    cards = min(cluster.gpu.nvlink_bandwidth, local * cluster.gpu.network_bandwidth) * cluster.link_efficiency
    latency = cluster.network_latency_s * math.log2(group.size / local) + cluster.nvlink_latency_s
    return Transfer(latency + sent / cards, nvlink_bytes=sent * (local - 1) / local, network_bytes=sent / local)


def reduced(cluster: Cluster, group: Group, whole_bytes: float) -> Transfer:
    """Predicts an all-reduce: a reduce-scatter and an all-gather, one after the other."""
    return gathered(cluster, group, whole_bytes) * 2


def exchanged(cluster: Cluster, group: Group, own_bytes: float) -> Transfer:
    """Predicts an all-to-all in which each rank has `own_bytes`, an equal part for every rank."""
    if group.size == 1:
        return Transfer()
    local = group.members_in_a_node(cluster)
    near, far = own_bytes * (local - 1) / group.size, own_bytes * (group.size - local) / group.size
    gpu, share = cluster.gpu, cluster.link_efficiency
    latency = cluster.nvlink_latency_s if far == 0 else cluster.network_latency_s
    seconds = latency + max(near / gpu.nvlink_bandwidth, far / gpu.network_bandwidth) / share
    return Transfer(seconds, near, far)


def sent(cluster: Cluster, stride: int, num_bytes: float) -> Transfer:
    """Predicts a transfer from one rank to another whose number is higher by `stride`."""
    if stride < cluster.gpus_per_node:
        bandwidth = cluster.gpu.nvlink_bandwidth * cluster.link_efficiency
        return Transfer(cluster.nvlink_latency_s + num_bytes / bandwidth, nvlink_bytes=num_bytes)
    bandwidth = cluster.gpu.network_bandwidth * cluster.link_efficiency
    return Transfer(cluster.network_latency_s + num_bytes / bandwidth, network_bytes=num_bytes)
