"""Tokens of a microbatch that some loss term counts: only these need logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain.config.schema.loss import depth_term
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.zigzag import slice_for_context_parallel
from mtrain.core.ranks.broadcast import broadcast_on_hosts
from mtrain.core.ranks.groups import Groups


def terms_by_distribution(batch: Microbatch) -> list[list[str]]:
    """Returns the terms of the main logits, then those of each depth of multi-token prediction."""
    depths = [depth_term(number) for number in range(1, len(batch.mtp) + 1)]
    return [[term for term in batch.weights if term not in depths], *([depth] for depth in depths)]


def weighed(batch: Microbatch, terms: Sequence[str]) -> Tensor:
    """Says which tokens have a weight or a share of the denominator in one of the terms, [batch, seq] bool."""
    # a token without weight can have a share: that of an empty sequence that counts (loss.empty_sequences=include)
    counted = [each[term] != 0 for term in terms for each in (batch.weights, batch.denominator_weights)]
    return torch.stack(counted).any(0)


class WeighedTokens:
    """Number of tokens that some term counts in each microbatch of a pass, known on the host without waiting."""

    def __init__(self, whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], groups: Groups) -> None:
        """Counts the tokens, at once.

        Args:
            whole: Full rows from the loader, on the CPU; None on ranks that receive theirs.
            rows: The same microbatches on the device, sliced for context parallelism.
        """
        self._numbers = {id(batch): number for number, batch in enumerate(rows)}
        self._counts = _counted(rows) if groups.device.type == "cpu" else _counts_of_reader(whole, rows, groups)

    def of(self, batch: Microbatch) -> list[int]:
        """Returns the number of tokens for the main logits, then for each depth; `batch` must be an object of
        `rows`."""
        return self._counts[self._numbers[id(batch)]]


def _counted(batches: Sequence[Microbatch]) -> list[list[int]]:
    # numpy: the batches are on the CPU
    return [[int(weighed(batch, terms).numpy().sum()) for terms in terms_by_distribution(batch)] for batch in batches]


def _counts_of_reader(
    whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], groups: Groups
) -> list[list[int]]:
    """Returns counts from the rank that read the batches. One broadcast between the hosts of TP."""
    counts = None
    if whole is not None:  # all ranks of a TP group have the same context-parallel slice
        slices = [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in whole]
        counts = torch.tensor(_counted(slices))
    shape = (len(rows), len(terms_by_distribution(rows[0])))
    return broadcast_on_hosts(counts, shape, torch.int64, groups).numpy().tolist()


def places(is_weighed: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` weighed tokens in [seq, batch] order, increasing, [count] int64.

    Args:
        is_weighed: [batch, seq] bool.
    """
    # not nonzero(), whose size the host would have to wait for; a stable sort keeps equal keys in their order
    keys = is_weighed.t().reshape(-1).to(torch.uint8)
    return keys.argsort(descending=True, stable=True)[:count]
