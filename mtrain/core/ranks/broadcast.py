"""Broadcasts batches from the one rank that reads them to the other ranks of its tensor-parallel group.

Rows go from device to device. Values that hosts need for decisions go from host to host, since reading them from a
device would wait for all its queued work.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.core.batch.batch import (
    DOCUMENT_STARTS,
    IMAGE_AHEAD,
    IMAGE_ENDS,
    IMAGE_PARTS,
    IMAGE_ROWS,
    FieldPath,
    Microbatch,
)
from mtrain.core.batch.collate import RowForm
from mtrain.core.batch.zigzag import slice_for_context_parallel
from mtrain.core.ranks.groups import Groups, to_device


def broadcast_batches(
    batches: Sequence[Microbatch] | None,
    count: int | None,
    terms: Sequence[str],
    config: Config,
    groups: Groups,
    extras: Sequence[str] = (),
) -> list[Microbatch]:
    """Sends the full rows of tensor-parallel rank 0 to the devices of all ranks of its tensor-parallel group.

    Takes two broadcasts over TP for all microbatches together, and one for each choice. Between hosts, it takes one
    broadcast if rows have document starts, and one of two numbers at the beginning if rows are packed. With images, it
    also takes one of their sizes, and for each microbatch with images two between hosts and two between devices (with
    MTP depths three).

    Args:
        batches: Full rows on the host; None on ranks other than tensor-parallel rank 0.
        count: Number of microbatches; None if rows are packed.
        extras: Names of extras and choices that loss functions and layers read.
    """
    if groups.layout.tp == 1:
        assert batches is not None
        return [batch.map(lambda rows: to_device(rows, groups.device)) for batch in batches]
    num_sequences = None
    if config.data.packing is not None:
        count, num_sequences = _shared_counts(batches, groups)
    assert count is not None, "without packing the configuration determines it"
    form = RowForm.of(config, extras)
    fields = form.dtypes(terms)
    has_documents = fields.pop(DOCUMENT_STARTS, None) is not None
    choices = {path: fields.pop(path) for path in [("choices", name) for name in form.choices]}
    reals = [path for path, dtype in fields.items() if dtype.is_floating_point]
    integers = [path for path in fields if path not in reals]
    shape = (config.train.micro_batch_size, form.width)
    # one tensor of each kind, since int64 and float64 hold every value of the narrower types
    packed = [
        _broadcast(batches, integers, torch.int64, (count, len(integers), *shape), groups),
        _broadcast(batches, reals, torch.float64, (count, len(reals), *shape), groups),
    ]
    paths = [*integers, *reals]
    unpacked: dict[FieldPath, Sequence[Tensor]] = {}
    if has_documents:
        unpacked[DOCUMENT_STARTS] = _document_starts(batches, (count, *shape), groups)
    for path, dtype in choices.items():
        choice_shape = (count, 1, *shape, *form.choices[path[1]])
        unpacked[path] = _broadcast(batches, [path], dtype, choice_shape, groups)[:, 0].unbind()
    images: Sequence[dict[FieldPath, Tensor]] = [{}] * count
    if form.patches_per_feature is not None:
        images = _images(batches, count, shape, form, groups)
    return [
        Microbatch.of(
            {path: rows.to(fields[path]) for path, rows in zip(paths, [*ints, *floats])}
            | {path: rows[number] for path, rows in unpacked.items()}
            | images[number],
            num_sequences,
        )
        for number, (ints, floats) in enumerate(zip(*packed))
    ]


def broadcast_on_hosts(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, groups: Groups) -> Tensor:
    """Returns the tensor of tensor-parallel rank 0 on the CPU of every rank of the group; `tensor` is None on others.

    One broadcast between hosts, none if the group has one rank. No host waits for a device.
    """
    numbers = torch.empty(shape, dtype=dtype) if tensor is None else tensor.to(dtype).contiguous()
    assert numbers.shape == shape, f"{tuple(numbers.shape)} instead of {shape}"
    if groups.layout.tp > 1:
        # `src` is a world rank, that of tensor-parallel rank 0
        dist.broadcast(numbers, dist.get_process_group_ranks(groups.tp_host)[0], group=groups.tp_host)
    return numbers


def _document_starts(batches: Sequence[Microbatch] | None, shape: tuple[int, ...], groups: Groups) -> Sequence[Tensor]:
    """Returns the document starts of each microbatch on the CPU. One broadcast between hosts."""
    starts = None if batches is None else torch.stack([batch.tensors()[DOCUMENT_STARTS] for batch in batches])
    return broadcast_on_hosts(starts, shape, torch.int32, groups).unbind()


def _images(
    batches: Sequence[Microbatch] | None, count: int, shape: tuple[int, int], form: RowForm, groups: Groups
) -> list[dict[FieldPath, Tensor]]:
    """Returns the tensors of each microbatch's images, none for a microbatch of text; `form` says which."""
    rows: list[tuple[FieldPath, tuple[int, ...]]] = list(zip(IMAGE_ROWS, [(), (3,)]))
    if form.num_predictions > 1:
        rows.append((IMAGE_AHEAD, (form.num_predictions - 1,)))
    own = None if batches is None else [batch.images for batch in batches]
    # patches, numbers in a patch, images
    sizes = None
    if own is not None:
        sizes = torch.tensor([[0] * 3 if each is None else [*each.pixels.shape, len(each.grids)] for each in own])
    found: list[dict[FieldPath, Tensor]] = []
    for number, (patches, width, images) in enumerate(
        broadcast_on_hosts(sizes, (count, 3), torch.int64, groups).tolist()
    ):
        batch = None if batches is None else batches[number : number + 1]
        parts = dict[FieldPath, Tensor]()
        for path, wide in rows if images else ():
            parts[path] = _broadcast(batch, [path], torch.int64, (1, 1, *shape, *wide), groups)[0, 0]
        for path, size in zip(IMAGE_PARTS, [(patches, width), (images, 3)]) if images else ():
            # pixels stay on the hosts; a rank copies only the images that it encodes to its device
            values = None if batch is None else batch[0].tensors()[path]
            parts[path] = broadcast_on_hosts(values, size, torch.int64 if path[1] == "grids" else torch.float32, groups)
        if images and form.bidirectional_images:
            ends = None if batch is None else batch[0].tensors()[IMAGE_ENDS]
            parts[IMAGE_ENDS] = broadcast_on_hosts(ends, shape, torch.int32, groups)
        found.append(parts)
    return found


def _shared_counts(batches: Sequence[Microbatch] | None, groups: Groups) -> tuple[int, int]:
    """Returns the number of microbatches, and the largest number of sequences in one. One broadcast between hosts."""
    counts = None
    if batches is not None:
        counts = torch.tensor([len(batches), max((batch.num_sequences for batch in batches), default=0)])
    num_microbatches, num_sequences = broadcast_on_hosts(counts, (2,), torch.int64, groups).numpy().tolist()
    return num_microbatches, num_sequences


def slice_for_rank(batches: Sequence[Microbatch], groups: Groups) -> list[Microbatch]:
    """Returns the part of each row that this context-parallel rank holds."""
    return [slice_for_context_parallel(batch, groups.layout.cp, groups.cp_rank) for batch in batches]


def _broadcast(
    batches: Sequence[Microbatch] | None,
    paths: Sequence[FieldPath],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    groups: Groups,
) -> Tensor:
    """Returns [microbatches, paths, batch, seq, ...] on every rank of the tensor-parallel group. One broadcast."""
    if groups.tp_rank == 0:
        assert batches is not None
        fields = [[batch.tensors()[path].to(dtype) for path in paths] for batch in batches]
        whole = torch.stack([torch.stack(rows) for rows in fields])
        packed = to_device(whole, groups.device)
    else:
        packed = torch.empty(shape, dtype=dtype, device=groups.device)
    # `src` is a world rank, that of tensor-parallel rank 0
    dist.broadcast(packed, dist.get_process_group_ranks(groups.tp)[0], group=groups.tp)
    return packed
