"""One rank of a tensor-parallel group reads the data; the others receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import Microbatch, MtpTargets
from mtrain.data.zigzag import slice_for_context_parallel
from mtrain.mcore.distributed.groups import Groups


def broadcast_batches(
    batches: Sequence[Microbatch] | None, count: int, terms: Sequence[str], config: Config, groups: Groups
) -> list[Microbatch]:
    """Full rows on the device of every rank of the tensor-parallel group.

    Two broadcasts over TP for all microbatches together.

    Args:
        batches: The step's microbatches on tensor-parallel rank 0, elsewhere None.
        count: Number of microbatches.
        terms: Names of the loss terms.
        config: Gives the shapes.
        groups: The process groups.
    """
    model = config.model
    num_integers = 3 + config.data.isolate_documents + (model.experts is not None) * (1 + model.mtp_depths)
    num_integers += 2 * model.mtp_depths
    if groups.layout.tp == 1:
        assert batches is not None
        return [_on_device(batch, groups.device) for batch in batches]
    shape = (config.train.micro_batch_size, config.data.seq_length)
    if groups.tp_rank == 0:
        assert batches is not None
        integers = torch.stack([_integers(batch) for batch in batches]).to(groups.device)
        reals = torch.stack([_reals(batch, terms) for batch in batches]).to(groups.device)
    else:
        integers = torch.empty(count, num_integers, *shape, dtype=torch.int64, device=groups.device)
        reals = torch.empty(count, 2 * len(terms), *shape, dtype=torch.float64, device=groups.device)
    source = dist.get_process_group_ranks(groups.tp)[0]
    dist.broadcast(integers, source, group=groups.tp)
    dist.broadcast(reals, source, group=groups.tp)
    return [_unpacked(whole, real, terms, config) for whole, real in zip(integers, reals)]


def slice_for_rank(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    """The part of each row that this context-parallel rank holds."""
    return [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in batches]


def _integers(batch: Microbatch) -> Tensor:
    fields = (batch.tokens, batch.labels, batch.positions, batch.document_starts, batch.is_padding)
    ahead = (field for depth in batch.mtp for field in (depth.tokens, depth.labels, depth.is_padding))
    return torch.stack([field.to(torch.int64) for field in (*fields, *ahead) if field is not None])


def _reals(batch: Microbatch, terms: Sequence[str]) -> Tensor:
    return torch.stack([field[term].double() for term in terms for field in (batch.weights, batch.denominator_weights)])


def _unpacked(integers: Tensor, reals: Tensor, terms: Sequence[str], config: Config) -> Microbatch:
    more = iter(integers[3:])
    starts = next(more).to("cpu", torch.int32) if config.data.isolate_documents else None

    def padding() -> Tensor | None:
        return None if config.model.experts is None else next(more).bool()

    return Microbatch(
        tokens=integers[0],
        labels=integers[1],
        positions=integers[2],
        weights={term: reals[2 * index].float() for index, term in enumerate(terms)},
        denominator_weights={term: reals[2 * index + 1] for index, term in enumerate(terms)},
        document_starts=starts,
        is_padding=padding(),
        mtp=tuple(MtpTargets(next(more), next(more), padding()) for _ in range(config.model.mtp_depths)),
    )


def _on_device(batch: Microbatch, device: torch.device) -> Microbatch:
    return replace(
        batch,
        tokens=batch.tokens.to(device),
        labels=batch.labels.to(device),
        positions=batch.positions.to(device),
        weights={term: weights.to(device) for term, weights in batch.weights.items()},
        denominator_weights={term: shares.to(device) for term, shares in batch.denominator_weights.items()},
        is_padding=None if batch.is_padding is None else batch.is_padding.to(device),
        mtp=tuple(depth.each(lambda field: field.to(device)) for depth in batch.mtp),
    )
