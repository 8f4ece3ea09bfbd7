"""Parameters and gradients under global names: the shards of a rank, or whole tensors, a few at a time."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtrain.base.tensor_slice import TensorSlice
from mtrain.core.engine.sharded_model import ShardedModel
from mtrain.core.layers.build import unwrap
from mtrain.core.layers.init_weights import sharded_tensors
from mtrain.core.layers.layer_spec import global_name
from mtrain.core.layers.sharded_parameters import held_values, is_written_here, sharded_parameters, shards, updated_of
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard
from mtrain.hf.io.broadcast import TensorKind, buffer_bytes, views


def parameter_shards(chunks: Sequence[nn.Module], groups: Groups) -> list[Shard]:
    """Copies this rank's parameters and buffers, in their own dtype, to the CPU."""
    # main weights of divided parameters are in float32
    return _shards(chunks, groups, lambda parameter: held_values(parameter).to(parameter.dtype))


def gradient_shards(sharded: ShardedModel, groups: Groups) -> list[Shard]:
    """Copies this rank's reduced gradients, in float32, to the CPU.

    Call it between the schedule and the optimizer's update, which clips in place. Gathers the gradients first if they
    are sharded over ranks.
    """
    # skips buffers and frozen parameters, which have no gradient
    return _shards(sharded.chunks, groups, sharded.whole_gradients().get)


def _shards(chunks: Sequence[nn.Module], groups: Groups, value_of: Callable[[Tensor], Tensor | None]) -> list[Shard]:
    shards = []
    for chunk in chunks:
        # yields the parts of fused parameters, so that names and shapes are the same for every tp
        for part in sharded_tensors(unwrap(chunk), groups, value_of):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            # a copy even on CPUs, because clipping and the next step write in place
            values = part.data.detach().to("cpu", copy=True)
            at = TensorSlice(tuple(part.global_offset[axes:]), tuple(values.shape))
            shards.append(Shard(name, tuple(part.global_shape[axes:]), at, values))
    return shards


class _Box(NamedTuple):
    """A rectangular part of a parameter."""

    name: str
    """Global name, with the numbers of layer and expert."""
    at: TensorSlice
    whole: TensorKind
    """Dtype and shape of the whole parameter; a table includes its padding rows."""

    @property
    def kind(self) -> TensorKind:
        return TensorKind(self.whole.dtype, self.at.shape)


class WholeParameters:
    """All parameters of a sharded model, with its adapters and saved buffers, by global name.

    Exactly one rank sends each element. Replicas divide the sending as they divide the writing of checkpoints.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
        """Finds out which rank has which boxes, by one all-gather of a list over the world.

        The parameters must be complete; `gather` sees later updates.
        """
        self._device, self._rank = groups.device, groups.rank
        self._local = dict(_local_boxes(chunks, groups))
        everyone: list[list[_Box]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(self._local))
        self._owners: dict[str, list[tuple[int, _Box]]] = defaultdict(list)
        for rank, parts in enumerate(everyone):
            for part in parts:
                self._owners[part.name].append((rank, part))
        self.kinds: Mapping[str, TensorKind] = {name: boxes[0][1].whole for name, boxes in self._owners.items()}
        """Global name -> dtype and shape; tables include their padding rows."""

    @torch.no_grad()
    def gather(self, names: Iterable[str], receiver: int | None = None) -> dict[str, Tensor] | None:
        """Gathers whole parameters by name, as new tensors on the device. Collective.

        Costs one broadcast, or one message to the receiver, from each rank that owns a part of them.

        Args:
            names: Global names, the same on all ranks.
            receiver: Rank that gets them, while others get None; None means every rank.
        """
        all_names = list(names)
        by_owner: dict[int, list[_Box]] = defaultdict(list)
        for rank, part in itertools.chain.from_iterable(self._owners[name] for name in all_names):
            by_owner[rank].append(part)
        is_receiver = receiver in (None, self._rank)
        gathered: dict[str, Tensor] = {}
        if is_receiver:
            for name in all_names:
                dtype, shape = self.kinds[name]
                gathered[name] = torch.empty(shape, dtype=dtype, device=self._device)
        for owner, parts in sorted(by_owner.items()):  # in the same order on all ranks
            buffer = self._sent(owner, parts, receiver)
            if buffer is not None and is_receiver:
                for part, values in zip(parts, views(buffer, [part.kind for part in parts]), strict=True):
                    part.at.of(gathered[part.name]).copy_(values)
        return gathered if is_receiver else None

    def _sent(self, owner: int, parts: Sequence[_Box], receiver: int | None) -> Tensor | None:
        """Sends the boxes of one rank; returns them as [bytes] on sender and receivers, None elsewhere."""
        is_mine = owner == self._rank
        if not (is_mine or receiver in (None, self._rank)):
            return None
        kinds = [part.kind for part in parts]
        buffer = torch.empty(buffer_bytes(kinds), dtype=torch.uint8, device=self._device)
        if is_mine:
            for part, view in zip(parts, views(buffer, kinds), strict=True):
                view.copy_(self._local[part].view(part.at.shape))
        if receiver is None:
            dist.broadcast(buffer, src=owner)
        elif is_mine and owner != receiver:
            dist.send(buffer, dst=receiver)
        elif owner != receiver:
            dist.recv(buffer, src=owner)
        return buffer


def _local_boxes(chunks: Sequence[Any], groups: Groups) -> Iterable[tuple[_Box, Tensor]]:
    """Yields the boxes that this rank sends, with their elements as views."""
    for parameter in sharded_parameters([unwrap(chunk) for chunk in chunks], groups):
        if not is_written_here(parameter):
            continue
        axes = next(shards(parameter, parameter.key, parameter.data)).prepend_axis_num  # of layers and experts
        for shard in updated_of(parameter):
            name = global_name(shard.key, shard.at.offset[:axes])
            whole = TensorKind(parameter.data.dtype, tuple(shard.global_shape[axes:]))
            yield _Box(name, TensorSlice(shard.at.offset[axes:], shard.at.shape[axes:]), whole), shard.data
