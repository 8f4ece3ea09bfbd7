"""Checks that replicas have the same bits.

Data- and context-parallel ranks have the same weights, tensor-parallel ranks the same norms, and an optimizer that is
not distributed has replicas of its state. They stay equal because all apply the same sum; no loss would reveal a
flipped bit in one of them, and nothing would correct it.

Replicas are ranks that have the same slice of the same tensor. Ranks exchange their slices once. Each later check is
one pass over replicated slices and one all-reduce of a number: each rank multiplies its digests by coefficients that
add up to 0 over the replicas of a slice.
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
from mtrain.base.spelling import counted
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.fingerprint import hash_of
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.training_state import WEIGHTS, Held, local_state
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.finite import NonFinite, described, non_finite

_MOST_RANKS = 8
_BITS = 1 << 64
_STEP = 0x9E3779B97F4A7C15
"""Step of the coefficients, 2^64 / golden ratio and odd, whose multiples are spread evenly."""


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
        """Compares all replicas: one all-reduce of a number and, if replicas differ, two all-gathers of short objects.

        Raises:
            NumericError: Replicas differ; the message, the same on all ranks, names the first tensor and the ranks.
            SpoiledStateError: A replica is not finite.
        """
        model.sharded.gather_parameters()
        replicated = self._replicated(model)
        total = torch.zeros((), dtype=torch.int64, device=self._groups.device)
        digests: list[tuple[Held, Tensor]] = []
        for part, coefficient in replicated:
            count = part.shard.data.numel()
            # as a whole tensor, because the identity contains the slice's position
            digest = hash_of(part.shard.key, part.shard.data, TensorSlice((0,), (count,)), (count,))
            total += digest * coefficient  # wraps around, as digests do
            digests.append((part, digest))
        dist.all_reduce(total)
        if int(total) == 0:  # the same decision on all ranks
            return
        non_finite_parts: list[NonFinite | None] = [None] * dist.get_world_size()
        dist.all_gather_object(non_finite_parts, non_finite([part.shard for part, _ in digests]))
        # nan in a replica says more than a difference
        if (not_finite := described(non_finite_parts)) is not None:
            raise SpoiledStateError(not_finite)
        raise NumericError(_difference(digests))

    def compared_bytes(self, model: RankModel) -> int:
        """Returns how many bytes a check reads on this rank."""
        return sum(part.shard.data.nbytes for part, _ in self._replicated(model))

    def _replicated(self, model: RankModel) -> list[tuple[Held, int]]:
        """Returns the slices that have replicas, with their coefficients."""
        parts = {_identity(part): part for part in local_state(model)}
        if self._coefficients is None:
            self._coefficients = _coefficients(list(parts), self._groups)
        return [(parts[identity], coefficient) for identity, coefficient in self._coefficients.items()]


def _identity(part: Held) -> int:
    """Returns the identity of a slice, the same on all of its replicas."""
    at = part.shard.at
    text = f"{part.shard.key}:{tuple(at.offset)}:{tuple(at.shape)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _coefficients(identities: Sequence[int], groups: Groups) -> dict[int, int]:
    """Returns identity -> factor of the digest, for slices with replicas, in the order of `identities`.

    One all-gather of the identities.
    """
    local = np.array(identities, np.int64)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    # number of replicas of each slice, and of those on lower ranks
    holders, turns = np.zeros(len(identities), np.int64), np.zeros(len(identities), np.int64)
    for rank, remote in enumerate(everyone):
        holds = np.isin(local, remote)
        holders += holds
        turns += holds if rank < groups.rank else 0
    return {
        identity: _coefficient(int(turn), int(count))
        for identity, turn, count in zip(identities, turns, holders)
        if count > 1
    }


def _coefficient(turn: int, count: int) -> int:
    """Returns number `turn` of `count` numbers that add up to 0 modulo 2^64."""
    # odd, so that multiplication loses no digest; only the last one, which completes the sum, may be even
    value = _odd(turn) if turn < count - 1 else -sum(map(_odd, range(count - 1)))
    value %= _BITS
    return value - _BITS if value >= _BITS // 2 else value  # as a signed int64


def _odd(turn: int) -> int:
    return (turn + 1) * _STEP * 2 + 1


def _difference(digests: Sequence[tuple[Held, Tensor]]) -> str:
    """Describes which tensor differs on which ranks; the same text on all ranks."""
    local = {_identity(part): _Digest(_named(part), int(digest)) for part, digest in digests}
    everyone: list[dict[int, _Digest]] = [local] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    values: dict[int, dict[int, _Digest]] = {}
    for rank, remote in enumerate(everyone):
        for identity, digest in remote.items():
            values.setdefault(identity, {})[rank] = digest
    differing = [by_rank for by_rank in values.values() if len({digest.value for digest in by_rank.values()}) > 1]
    assert differing, "the coefficients of equal digests add up to 0"
    by_rank = differing[0]
    counts = Counter(digest.value for digest in by_rank.values())
    (most, number), *minorities = counts.most_common()
    what = next(iter(by_rank.values())).what
    more = f"; {counted(len(differing) - 1, 'more such tensor')}" if len(differing) > 1 else ""
    if minorities and minorities[0][1] == number:  # no majority
        return f"{what} has different bits on each of {_ranks(list(by_rank))}, which should be equal{more}"
    odd = [rank for rank, digest in by_rank.items() if digest.value != most]
    sound = [rank for rank in by_rank if rank not in odd]
    return f"{what} has different bits on {_ranks(odd)} than on {_ranks(sound)}, which should be equal{more}"


def _named(part: Held) -> str:
    return part.name if part.kind == WEIGHTS else f"the optimizer's {part.kind} of {part.name}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (", ..." if len(ranks) > _MOST_RANKS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
