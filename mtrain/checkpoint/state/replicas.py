"""Checks that ranks with the same numbers hold the same bits.

Data- and context-parallel ranks hold the same weights, tensor-parallel ranks the same norms, and an optimizer that is
not distributed has replicas of its state. They stay equal because all apply the same sum; a flipped bit in one of them
would never show in a loss and never be corrected.

Replicas are ranks that hold the same slice of the same tensor. Ranks exchange these once. Each later check is one pass
over what has replicas, and one number that all ranks add: each multiplies its digests by coefficients that add up to 0
over the replicas of a slice.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import NumericError, SpoiledStateError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import WEIGHTS, Held, local_state
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.finite import NonFinite, described, non_finite

_MOST_RANKS = 8
_BITS = 1 << 64
_STEP = 0x9E3779B97F4A7C15
"""Step of the coefficients, 2^64 / golden ratio, odd: its multiples are spread evenly."""


class _Digest(NamedTuple):
    what: str
    value: int


class ReplicaCheck:
    """Compares the replicas of one model; all methods are collective over the world."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._coefficients: dict[int, int] | None = None

    @torch.no_grad()
    def run(self, model: RankModel) -> None:
        """Compares all replicas. One all-reduce of one number; if replicas differ, two all-gathers of short objects.

        Raises:
            NumericError: Replicas differ; the message names the first tensor and the ranks, the same on all ranks.
            SpoiledStateError: A replica is not finite.
        """
        model.sharded.gather_parameters()
        held = self._held(model)
        total = torch.zeros((), dtype=torch.int64, device=self._groups.device)
        digests: list[tuple[Held, Tensor]] = []
        for each, coefficient in held:
            count = each.shard.data.numel()
            # as a tensor of its own, since the identity contains its position
            digest = hash_of(each.shard.key, each.shard.data, TensorSlice((0,), (count,)), (count,))
            total += digest * coefficient  # wraps around, as digests do
            digests.append((each, digest))
        dist.all_reduce(total)
        if int(total) == 0:  # the same number on all ranks
            return
        found: list[NonFinite | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, non_finite([each.shard for each, _ in digests]))
        # nan in a replica says more than a difference
        if (not_finite := described(found)) is not None:
            raise SpoiledStateError(not_finite)
        raise NumericError(_difference(digests))

    def compared_bytes(self, model: RankModel) -> int:
        """Returns the bytes that a check reads on this rank."""
        return sum(each.shard.data.nbytes for each, _ in self._held(model))

    def _held(self, model: RankModel) -> list[tuple[Held, int]]:
        """Returns what has replicas, each with its coefficient."""
        held = {_identity(each): each for each in local_state(model)}
        if self._coefficients is None:
            self._coefficients = _coefficients(list(held), self._groups)
        return [(held[identity], coefficient) for identity, coefficient in self._coefficients.items()]


def _identity(held: Held) -> int:
    """Returns the identity of a slice, the same on every rank that holds it."""
    at = held.shard.at
    text = f"{held.shard.key}:{tuple(at.offset)}:{tuple(at.shape)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _coefficients(own: Sequence[int], groups: Groups) -> dict[int, int]:
    """Returns identity -> factor of its digest, for slices that other ranks hold as well, in the given order.

    One all-gather of the identities.
    """
    mine = np.array(own, np.int64)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    # number of ranks that hold the slice, and of those with a lower number
    holders, turns = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
    for rank, theirs in enumerate(everyone):
        holds = np.isin(mine, theirs)
        holders += holds
        turns += holds if rank < groups.rank else 0
    return {
        identity: _coefficient(int(turn), int(count)) for identity, turn, count in zip(own, turns, holders) if count > 1
    }


def _coefficient(turn: int, count: int) -> int:
    """Returns number `turn` of `count` numbers that add up to 0 modulo 2^64."""
    # odd, so that no digest is lost; only the last one may be even, as it completes the sum
    value = _odd(turn) if turn < count - 1 else -sum(map(_odd, range(count - 1)))
    value %= _BITS
    return value - _BITS if value >= _BITS // 2 else value  # as torch's int64 holds it


def _odd(turn: int) -> int:
    return (turn + 1) * _STEP * 2 + 1


def _difference(digests: Sequence[tuple[Held, Tensor]]) -> str:
    """Says what differs where; the same text on all ranks."""
    own = {_identity(each): _Digest(_named(each), int(digest)) for each, digest in digests}
    everyone: list[dict[int, _Digest]] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    values: dict[int, dict[int, _Digest]] = {}
    for rank, theirs in enumerate(everyone):
        for identity, digest in theirs.items():
            values.setdefault(identity, {})[rank] = digest
    wrong = [found for found in values.values() if len({digest.value for digest in found.values()}) > 1]
    assert wrong, "the coefficients of equal digests add up to 0"
    found = wrong[0]
    counts = Counter(digest.value for digest in found.values())
    (most, number), *others = counts.most_common()
    what = next(iter(found.values())).what
    more = f"; {len(wrong) - 1} more such tensors" if len(wrong) > 1 else ""
    if others and others[0][1] == number:  # no majority
        return f"{what} has other bits on each of {_ranks(list(found))}, which hold the same{more}"
    odd = [rank for rank, digest in found.items() if digest.value != most]
    sound = [rank for rank in found if rank not in odd]
    return f"{what} has other bits on {_ranks(odd)} than on {_ranks(sound)}, which hold the same{more}"


def _named(held: Held) -> str:
    return held.name if held.kind == WEIGHTS else f"the optimizer's {held.kind} of {held.name}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
