"""One rank of a tensor-parallel group reads the data; the others receive it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.data.batch import DOCUMENT_STARTS, FieldPath, Microbatch, field_dtypes
from mtrain.data.zigzag import slice_for_context_parallel
from mtrain.mcore.distributed.groups import Groups


def broadcast_batches(
    batches: Sequence[Microbatch] | None,
    count: int | None,
    terms: Sequence[str],
    config: Config,
    groups: Groups,
    extras: Sequence[str] = (),
) -> list[Microbatch]:
    """Full rows on the device of every rank of the tensor-parallel group.

    Two broadcasts over TP for all microbatches together; where rows are packed a third one in front, of two numbers
    that the host waits for.

    Args:
        batches: The step's microbatches on tensor-parallel rank 0, elsewhere None.
        count: Number of microbatches; None where rows are packed and ranks without batches do not know it.
        terms: Names of the loss terms.
        config: Gives the shapes.
        groups: The process groups.
        extras: Names of what their loss functions read beside the weights.
    """
    # Every rank with tp_rank 0 reads for itself, whatever its place in DP, CP and PP: nothing travels between those.
    if groups.layout.tp == 1:
        assert batches is not None
        # not waited for, where the loader has pinned them
        return [batch.map(lambda rows: rows.to(groups.device, non_blocking=True)) for batch in batches]
    model = config.model
    # Both sides derive fields and shapes from the configuration: the number of microbatches is all that a packed step
    # decides by itself.
    num_sequences = None
    if config.data.packing is not None:
        count, num_sequences = _shared_counts(batches, groups)
    assert count is not None, "without packing it follows from the configuration"
    is_packed, has_routers = config.data.packing is not None, model.experts is not None
    flags = is_packed, has_routers, model.mtp_depths, extras, bool(config.data.source_names)
    fields = field_dtypes(terms, config.data.isolate_documents, *flags)
    reals = [path for path, dtype in fields.items() if dtype.is_floating_point]
    integers = [path for path in fields if path not in reals]
    shape = (config.train.micro_batch_size, config.row_width)  # whole rows; they are cut for CP afterwards
    # one vector of each kind: int64 and float64 hold every value of the narrower types
    packed = [
        _broadcast(batches, integers, torch.int64, (count, len(integers), *shape), groups),
        _broadcast(batches, reals, torch.float64, (count, len(reals), *shape), groups),
    ]
    paths = [*integers, *reals]
    starts = _document_starts(batches, integers, packed[0])
    return [
        Microbatch.of(
            {path: rows.to(fields[path]) for path, rows in zip(paths, [*whole, *real])}
            | ({} if starts is None else {DOCUMENT_STARTS: starts[number]}),
            num_sequences,
        )
        for number, (whole, real) in enumerate(zip(*packed))
    ]


def _document_starts(
    batches: Sequence[Microbatch] | None, paths: Sequence[FieldPath], packed: Tensor
) -> Sequence[Tensor] | None:
    """Of each microbatch, on the CPU: attention cuts rows by document on the host. None where rows are one document.

    At most one copy from the device for all of them; none where this rank has read them.
    """
    if DOCUMENT_STARTS not in paths:
        return None
    if batches is not None:
        return [batch.tensors()[DOCUMENT_STARTS] for batch in batches]
    return packed[:, paths.index(DOCUMENT_STARTS)].to("cpu", torch.int32).unbind()


def _shared_counts(batches: Sequence[Microbatch] | None, groups: Groups) -> tuple[int, int]:
    """How many microbatches tensor-parallel rank 0 has, and how many sequences the one with most. One broadcast."""
    own = [] if batches is None else [batch.num_sequences for batch in batches]
    counts = torch.tensor([len(own), max(own, default=0)], device=groups.device)
    dist.broadcast(counts, dist.get_process_group_ranks(groups.tp)[0], group=groups.tp)
    num_microbatches, num_sequences = counts.tolist()
    return num_microbatches, num_sequences


def slice_for_rank(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    """The part of each row that this context-parallel rank holds."""
    return [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in batches]


def _broadcast(
    batches: Sequence[Microbatch] | None,
    paths: Sequence[FieldPath],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    groups: Groups,
) -> Tensor:
    """[microbatches, paths, batch, seq] on every rank of the tensor-parallel group. One broadcast."""
    if groups.tp_rank == 0:
        assert batches is not None
        given = [[batch.tensors()[path].to(dtype) for path in paths] for batch in batches]
        whole = torch.stack([torch.stack(rows) for rows in given])
        on_gpu = groups.device.type == "cuda"
        # from memory that is not pinned the host would wait for the copy
        packed = whole.pin_memory().to(groups.device, non_blocking=True) if on_gpu else whole
    else:
        packed = torch.empty(shape, dtype=dtype, device=groups.device)  # never read before the broadcast has filled it
    # `src` is a rank of the world: the first one of this TP group.
    dist.broadcast(packed, dist.get_process_group_ranks(groups.tp)[0], group=groups.tp)
    return packed
