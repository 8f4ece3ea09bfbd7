"""Broadcast of the data that one rank of a tensor-parallel group reads.

Rows go from device to device. Values that the host needs for decisions go from host to host, as reading them from a
device would wait for all its queued work.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.core.batch.batch import DOCUMENT_STARTS, FieldPath, Microbatch
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
    """Returns full rows on the device of every rank of the tensor-parallel group, as tensor-parallel rank 0 has them.

    Costs two broadcasts over TP for all microbatches together, and one for each choice that they name. Hosts of TP
    broadcast the starts of documents, where rows have some, and before everything else two numbers, where rows are
    packed: `count`, the number of microbatches, is then None. `extras` names what loss functions read in addition to
    the weights.
    """
    if groups.layout.tp == 1:
        assert batches is not None
        return [batch.map(lambda rows: to_device(rows, groups.device)) for batch in batches]
    num_sequences = None
    if config.data.packing is not None:
        count, num_sequences = _shared_counts(batches, groups)
    assert count is not None, "without packing it follows from the configuration"
    form = RowForm.of(config, extras)
    fields = form.dtypes(terms)
    has_documents = fields.pop(DOCUMENT_STARTS, None) is not None
    choices = {path: fields.pop(path) for path in [("choices", name) for name in form.choices]}
    reals = [path for path, dtype in fields.items() if dtype.is_floating_point]
    integers = [path for path in fields if path not in reals]
    shape = (config.train.micro_batch_size, form.width)
    # one vector of each kind: int64 and float64 hold every value of the narrower types
    packed = [
        _broadcast(batches, integers, torch.int64, (count, len(integers), *shape), groups),
        _broadcast(batches, reals, torch.float64, (count, len(reals), *shape), groups),
    ]
    paths = [*integers, *reals]
    others: dict[FieldPath, Sequence[Tensor]] = {}
    if has_documents:
        others[DOCUMENT_STARTS] = _document_starts(batches, (count, *shape), groups)
    for path, dtype in choices.items():
        of_choice = (count, 1, *shape, *form.choices[path[1]])
        others[path] = _broadcast(batches, [path], dtype, of_choice, groups)[:, 0].unbind()
    return [
        Microbatch.of(
            {path: rows.to(fields[path]) for path, rows in zip(paths, [*whole, *real])}
            | {path: rows[number] for path, rows in others.items()},
            num_sequences,
        )
        for number, (whole, real) in enumerate(zip(*packed))
    ]


def broadcast_on_hosts(own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, groups: Groups) -> Tensor:
    """Returns a tensor of tensor-parallel rank 0 on the CPU of every rank of the group; `own` is None elsewhere.

    One broadcast between hosts, none if the group has one rank. No host waits for a device.
    """
    numbers = torch.empty(shape, dtype=dtype) if own is None else own.to(dtype).contiguous()
    assert numbers.shape == shape, f"{tuple(numbers.shape)} in the place of {shape}"
    if groups.layout.tp > 1:
        # `src` is a rank of the world: the first one of this TP group
        dist.broadcast(numbers, dist.get_process_group_ranks(groups.tp_host)[0], group=groups.tp_host)
    return numbers


def _document_starts(batches: Sequence[Microbatch] | None, shape: tuple[int, ...], groups: Groups) -> Sequence[Tensor]:
    """Returns each microbatch's starts of documents on the CPU. One broadcast of hosts."""
    own = None if batches is None else torch.stack([batch.tensors()[DOCUMENT_STARTS] for batch in batches])
    return broadcast_on_hosts(own, shape, torch.int32, groups).unbind()


def _shared_counts(batches: Sequence[Microbatch] | None, groups: Groups) -> tuple[int, int]:
    """Returns the number of microbatches, and the most sequences in one of them. One broadcast of hosts."""
    own = None
    if batches is not None:
        own = torch.tensor([len(batches), max((batch.num_sequences for batch in batches), default=0)])
    num_microbatches, num_sequences = broadcast_on_hosts(own, (2,), torch.int64, groups).numpy().tolist()
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
        given = [[batch.tensors()[path].to(dtype) for path in paths] for batch in batches]
        whole = torch.stack([torch.stack(rows) for rows in given])
        packed = to_device(whole, groups.device)
    else:
        packed = torch.empty(shape, dtype=dtype, device=groups.device)
    # `src` is a rank of the world: the first one of this TP group
    dist.broadcast(packed, dist.get_process_group_ranks(groups.tp)[0], group=groups.tp)
    return packed
