"""Which tokens of a microbatch some loss term counts: only these need logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtrain.config.schema.loss import depth_term
from mtrain.data.batch import Microbatch
from mtrain.data.zigzag import slice_for_context_parallel
from mtrain.mcore.distributed.groups import Groups


def terms_by_distribution(batch: Microbatch) -> list[list[str]]:
    """Names of the terms of the main logits, then of each depth of multi-token prediction."""
    depths = [depth_term(number) for number in range(1, len(batch.mtp) + 1)]
    return [[term for term in batch.weights if term not in depths], *([depth] for depth in depths)]


def weighed(batch: Microbatch, terms: Sequence[str]) -> Tensor:
    """[batch, seq] bool: tokens that have a weight or a share of the denominator in one of the terms."""
    # a share can lie at a token without weight: an empty sequence that counts (loss.empty_sequences=include)
    counted = [each[term] != 0 for term in terms for each in (batch.weights, batch.denominator_weights)]
    return torch.stack(counted).any(0)


class WeighedTokens:
    """How many tokens of each microbatch of a pass some term counts, known on the host without waiting for kernels."""

    def __init__(self, whole: Sequence[Microbatch] | None, rows: Sequence[Microbatch], groups: Groups) -> None:
        """Args:
        whole: Full rows as the loader gives them, on the CPU; None on ranks that receive theirs.
        rows: The same microbatches on the device, sliced for context parallelism.
        groups: The process groups.
        """
        self._numbers = {id(batch): number for number, batch in enumerate(rows)}
        if groups.device.type == "cpu":
            self._read = _counted(rows)
        elif whole is not None:
            self._read = _counted(
                [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in whole]
            )
        else:
            self._read = _copied(rows)

    def of(self, batch: Microbatch) -> list[int]:
        """Of the main logits, then of each depth.

        Args:
            batch: One of the pass's own, the very object.
        """
        return self._read()[self._numbers[id(batch)]]


def _counted(batches: Sequence[Microbatch]) -> Callable[[], list[list[int]]]:
    """Of batches on the CPU."""
    # numpy: nothing here is an operation on a device
    counts = [[int(weighed(batch, terms).numpy().sum()) for terms in terms_by_distribution(batch)] for batch in batches]
    return lambda: counts


def _copied(rows: Sequence[Microbatch]) -> Callable[[], list[list[int]]]:
    """Of batches on a GPU, which other ranks have sent: the counts follow by an asynchronous copy."""
    counts = torch.stack(
        [torch.stack([weighed(batch, terms).sum() for terms in terms_by_distribution(batch)]) for batch in rows]
    )
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    # asked for behind the kernels of a whole forward pass, which were queued after this copy: it has arrived by then
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def read() -> list[list[int]]:
        arrived.synchronize()
        found: list[list[int]] = host.numpy().tolist()
        return found

    return read


def places(is_weighed: Tensor, count: int) -> Tensor:
    """[count] int64: where the tokens are in [seq, batch] order, increasing.

    Args:
        is_weighed: [batch, seq] bool.
        count: How many they are.
    """
    # not nonzero(), whose size the host would have to wait for; a stable sort keeps equal keys in their order
    keys = is_weighed.t().reshape(-1).to(torch.uint8)
    return keys.argsort(descending=True, stable=True)[:count]
