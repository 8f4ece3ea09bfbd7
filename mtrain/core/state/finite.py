"""Searches for nan and inf in a state that is about to be saved or has been loaded."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain.base.spelling import counted
from mtrain.core.state.shard import Shard

_MOST_RANKS = 8
"""Largest number of ranks that a message names."""


class NonFinite(NamedTuple):
    """Non-finite numbers in the shards of one rank."""

    location: str
    """Tensor, index and value of the first non-finite number."""
    num_tensors: int
    """Number of tensors with such numbers."""


@torch.no_grad()
def non_finite(shards: Sequence[Shard]) -> NonFinite | None:
    """Finds the first number that is nan or inf; None if all are finite.

    Each shard is read once, on its device; integers are skipped. The host reads one vector of flags from each device.
    """
    # a rank may hold no element of a tensor, and aminmax of an empty shard raises
    floats = [shard for shard in shards if shard.data.is_floating_point() and shard.data.numel() > 0]
    if not floats:
        return None
    # minimum and maximum reveal every nan and inf without a mask as large as the shard
    extremes = [torch.stack(torch.aminmax(shard.data.detach())) for shard in floats]
    flags = _read([pair.isfinite().all() for pair in extremes])
    bad = [shard for shard, is_finite in zip(floats, flags, strict=True) if not is_finite]
    if not bad:
        return None
    return NonFinite(_place(bad[0]), len({shard.key for shard in bad}))


def _read(flags: Sequence[Tensor]) -> list[bool]:
    """Returns the values of the flags; reads each device once, not once per flag."""
    values: dict[int, bool] = {}
    for device in {flag.device for flag in flags}:
        numbers = [number for number, flag in enumerate(flags) if flag.device == device]
        values.update(zip(numbers, torch.stack([flags[number] for number in numbers]).tolist(), strict=True))
    return [values[number] for number in range(len(flags))]


def described(everyone: Sequence[NonFinite | None]) -> str | None:
    """Describes the findings of all ranks, in order; None if all numbers are finite."""
    findings = {rank: finding for rank, finding in enumerate(everyone) if finding is not None}
    if not findings:
        return None
    rank, first = next(iter(findings.items()))
    text = f"{first.location} on rank {rank}"
    if first.num_tensors > 1:
        text += f", one of {counted(first.num_tensors, 'such tensor')} there"
    further_ranks = list(findings)[1:]
    if further_ranks:
        named = ", ".join(map(str, further_ranks[:_MOST_RANKS])) + (", ..." if len(further_ranks) > _MOST_RANKS else "")
        text += (
            f"; more on rank {named}"
            if len(further_ranks) == 1
            else f"; more on {counted(len(further_ranks), 'rank')}: {named}"
        )
    return text


def _place(shard: Shard) -> str:
    """Describes the first non-finite number by its global index: `decoder.final_layernorm.weight[3] is nan`."""
    # only for the message, since this takes a mask as large as the shard
    values: Tensor = shard.data.detach().view(shard.at.shape)
    index = (~values.isfinite()).nonzero()[0].tolist()
    value = values[tuple(index)].item()
    return f"{shard.key}{[start + within for start, within in zip(shard.at.offset, index, strict=True)]} is {value}"
