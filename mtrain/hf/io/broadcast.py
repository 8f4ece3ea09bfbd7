"""Sends named tensors from a trainer to other processes, such as inference engines: one description, then buckets.

The description is a JSON object that lists the tensors of each bucket; a bucket is a flat buffer of bytes. Needs only
torch, so that a receiver loads neither Megatron-Core nor a configuration.
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes

ALIGNMENT = 16
"""Alignment in bytes, because a view of another dtype must begin at a multiple of its element size."""


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: Sizes

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def buffer_bytes(kinds: Sequence[TensorKind]) -> int:
    """Returns the size in bytes of a buffer for tensors of these kinds."""
    return _starts(kinds)[-1]


def views(buffer: Tensor, kinds: Sequence[TensorKind]) -> list[Tensor]:
    """Returns the tensors in a buffer, [bytes] uint8, as views, in the order of `kinds`."""
    return [
        buffer[start : start + kind.size_bytes].view(kind.dtype).view(kind.shape)
        for start, kind in zip(_starts(kinds), kinds)
    ]


def _starts(kinds: Sequence[TensorKind]) -> list[int]:
    aligned = (-(-kind.size_bytes // ALIGNMENT) * ALIGNMENT for kind in kinds)
    return list(itertools.accumulate(aligned, initial=0))


BUCKET_BYTES = 1 << 28
"""Largest bucket in bytes, unless a single tensor is larger."""
_VERSION = 1


class NamedKind(NamedTuple):
    """Name and kind of a tensor to send."""

    name: str
    kind: TensorKind


def send_tensors(
    named: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Sequence[NamedKind]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Sends tensors to every other rank of a group, one broadcast per bucket.

    Args:
        named: Names and tensors in the order of the buckets; each is read just before it is sent.
        buckets: Names and kinds of the tensors in each bucket.
        group: This rank and the receivers; may be outside torch.distributed's world.
    """
    described = [[_described(item) for item in bucket] for bucket in buckets]
    text = json.dumps({"version": _VERSION, "buckets": described}).encode()
    send_bytes(torch.frombuffer(bytearray(text), dtype=torch.uint8), group, device)
    tensors = iter(named)
    for bucket in buckets:
        kinds = [item.kind for item in bucket]
        buffer = torch.empty(buffer_bytes(kinds), dtype=torch.uint8, device=device)
        for announced, view in zip(bucket, views(buffer, kinds), strict=True):
            name, values = next(tensors)
            actual = NamedKind(name, TensorKind(values.dtype, tuple(values.shape)))
            assert actual == announced, f"{actual} instead of {announced}"
            view.copy_(values)
        _broadcast(buffer, group, group.rank())


def receive_hf_tensors(
    group: dist.ProcessGroup, source: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that `Engine.broadcast_hf_tensors` sends, as (name, tensor), in the order of the model.

    Every rank of the group except the source must iterate to the end, for instance in vLLM's `load_weights`. Tensors
    are views of a bucket; memory holds one bucket at a time, unless you keep its tensors.

    Args:
        source: Rank of the sender in the group.
        device: Device on which the group receives: "cuda" with NCCL.

    Raises:
        DataError: The sender uses another version of the protocol.
    """
    content = json.loads(bytes(receive_bytes(group, source, device).numpy()))
    if content["version"] != _VERSION:
        raise DataError(
            f"the sender describes tensors in version {content['version']}, but version {_VERSION} is needed; install "
            "the same version of mtrain on both sides"
        )
    for described in content["buckets"]:
        kinds = [TensorKind(getattr(torch, dtype), tuple(shape)) for _, dtype, shape in described]
        buffer = torch.empty(buffer_bytes(kinds), dtype=torch.uint8, device=device)
        _broadcast(buffer, group, source)
        yield from zip((name for name, _, _ in described), views(buffer, kinds), strict=True)


def send_bytes(content: Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sends [bytes] uint8, which may be empty, to every other rank of a group, after their number."""
    _broadcast(torch.tensor([content.numel()], dtype=torch.int64, device=device), group, group.rank())
    if content.numel():
        _broadcast(content.to(device), group, group.rank())


def receive_bytes(group: dist.ProcessGroup, source: int, device: torch.device | str) -> Tensor:
    """Returns the [bytes] uint8 that rank `source` of the group sends with `send_bytes`, on the CPU."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    _broadcast(length, group, source)
    content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if content.numel():
        _broadcast(content, group, source)
    return content.cpu()


def _described(item: NamedKind) -> tuple[str, str, Sizes]:
    return item.name, str(item.kind.dtype).removeprefix("torch."), item.kind.shape


def _broadcast(tensor: Tensor, group: dist.ProcessGroup, root: int) -> None:
    # the group's method: dist.broadcast only knows groups of this process's world, and RL frameworks open others
    group.broadcast(tensor, root).wait()
