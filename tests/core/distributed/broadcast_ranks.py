"""What a rank of a tensor-parallel group receives, and by which way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch
from mtrain.core.ranks.broadcast import broadcast_batches, broadcast_on_hosts, slice_for_rank
from mtrain.core.ranks.groups import Groups, open_host_group
from mtrain.core.ranks.init import naming_lost_ranks
from mtrain.core.step.loss import WeighedTokens

TIMEOUT = timedelta(minutes=10)


class Received(NamedTuple):
    """What one rank has received."""

    members: list[int]
    """Ranks of the group of hosts."""
    is_same: bool
    """Whether all rows are those that were read."""
    of_hosts: list[list[Any]]
    """Facts by the hosts' way, where rows never reached the device: number of sequences, starts of documents and
    counted tokens of each microbatch."""
    expected: list[list[Any]]
    """The same facts where rows reached the device."""


def batch(number: int, width: int, config: Config) -> Microbatch:
    """Builds a row of documents whose lengths, and positions without loss, depend on its number."""
    rows = torch.arange(width).view(1, -1) + number
    ids = (torch.arange(width) // (number + 3)).view(1, -1)
    weights = {MAIN_TERM: torch.rand(1, width, generator=torch.Generator().manual_seed(number)) * (rows % 3 > 0)}
    shares = {MAIN_TERM: weights[MAIN_TERM].double()}
    starts = (ids * (number + 3)).to(torch.int32) if config.data.isolate_documents else None
    read = Microbatch(rows, rows + 1, rows + 2, weights, shares, starts, None, num_sequences=1)
    if config.data.packing is None:
        return read
    return replace(read, sequence_ids=ids, num_sequences=int(ids.max()) + 1)


def received(groups: Groups, configs: Sequence[Config], count: int) -> list[Received]:
    """Broadcasts batches of each configuration, through a group of hosts next to the group of devices."""
    hosts = replace(groups, tp_host=open_host_group(groups.tp, TIMEOUT))
    return [_received(hosts, config, count) for config in configs]


def _received(groups: Groups, config: Config, count: int) -> Received:
    batches = [batch(number, config.row_width, config) for number in range(count)]
    own = batches if groups.tp_rank == 0 else None
    # where rows are packed, ranks that do not read cannot know how many there are
    known = None if config.data.packing is not None else count
    found = broadcast_batches(own, known, [MAIN_TERM], config, groups)
    pairs = [(one.tensors(), other.tensors()) for one, other in zip(found, batches, strict=True)]
    is_same = all(
        one.keys() == other.keys()
        and all(torch.equal(one[path], other[path]) and one[path].dtype == other[path].dtype for path in one)
        for one, other in pairs
    )
    return Received(
        dist.get_process_group_ranks(groups.tp_host),
        is_same,
        _without_rows(own, known, config, replace(groups, device=torch.device("meta"))),
        _facts(WeighedTokens(own, rows := slice_for_rank(found, groups), groups), rows),
    )


def _without_rows(own: list[Microbatch] | None, count: int | None, config: Config, groups: Groups) -> list[list[Any]]:
    """Returns the facts on a device whose tensors cannot be read and to which nothing is sent."""
    send = dist.broadcast

    def among_hosts(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        if group is groups.tp_host:
            send(tensor, source, group=group)

    with mock.patch.object(dist, "broadcast", among_hosts):
        rows = slice_for_rank(broadcast_batches(own, count, [MAIN_TERM], config, groups), groups)
        return _facts(WeighedTokens(own, rows, groups), rows)


def _facts(counts: WeighedTokens, rows: list[Microbatch]) -> list[list[Any]]:
    starts = [each.document_starts for each in rows]
    return [
        [each.num_sequences, None if start is None else start.tolist(), counts.of(each)]
        for each, start in zip(rows, starts, strict=True)
    ]


def from_a_rank_that_leaves(groups: Groups) -> None:
    """Ends the rank that reads before it has sent anything."""
    hosts = replace(groups, tp_host=open_host_group(groups.tp, TIMEOUT))
    if groups.tp_rank != 0:
        with naming_lost_ranks(lambda: ""):
            broadcast_on_hosts(None, (2,), torch.int64, hosts)


def through_a_missing_interface(groups: Groups) -> None:
    """Makes gloo use a network interface that this machine does not have."""
    os.environ["GLOO_SOCKET_IFNAME"] = "none0"
    open_host_group(groups.tp, TIMEOUT)
