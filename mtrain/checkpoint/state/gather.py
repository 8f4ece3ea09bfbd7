"""Parameters and gradients under their global names: the shards of a rank, or whole ones, a few at a time."""

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
from mtrain.core.layers.sharded_parameters import is_written_here, sharded_parameters, shards, whole_of
from mtrain.core.ranks.groups import Groups
from mtrain.core.state.shard import Shard
from mtrain.hf.io.broadcast import TensorKind, buffer_bytes, views


def parameter_shards(chunks: Sequence[nn.Module], groups: Groups) -> list[Shard]:
    """Copies this rank's parameters, in their own dtype, to the CPU; buffers too, which have no gradient."""
    return _shards(chunks, groups, lambda value: value)


def gradient_shards(sharded: ShardedModel, groups: Groups) -> list[Shard]:
    """Copies this rank's reduced gradients, in float32, to the CPU.

    Call it between the schedule and the optimizer's update, which clips in place. Gathers the gradients first if each
    rank has only its own part's.
    """
    # buffers and frozen parameters have none and are left out
    return _shards(sharded.chunks, groups, sharded.whole_gradients().get)


def _shards(chunks: Sequence[nn.Module], groups: Groups, value_of: Callable[[Tensor], Tensor | None]) -> list[Shard]:
    shards = []
    for chunk in chunks:
        # fused parameters come as their parts, so that names and shapes are the same for every tp
        for part in sharded_tensors(unwrap(chunk), groups, value_of):
            axes = part.prepend_axis_num
            name = global_name(part.key, tuple(part.global_offset[:axes]))
            # a copy on CPUs too: clipping and the next step write in place
            values = part.data.detach().to("cpu", copy=True)
            at = TensorSlice(tuple(part.global_offset[axes:]), tuple(values.shape))
            shards.append(Shard(name, tuple(part.global_shape[axes:]), at, values))
    return shards


class _Box(NamedTuple):
    """A box of a parameter, with its owner."""

    name: str
    """Global name, layers and experts spelled out."""
    at: TensorSlice
    whole: TensorKind
    """Kind of the whole parameter; a table includes its rows of vocabulary padding."""

    @property
    def kind(self) -> TensorKind:
        return TensorKind(self.whole.dtype, self.at.shape)


class WholeParameters:
    """All parameters of a model that is spread over ranks, adapters and buffers of its state included, by global name.

    Every element is sent by one rank, which has its main replica; replicas share the sending like the writing of
    checkpoints.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: Groups) -> None:
        """Finds out which rank has which boxes: one all-gather of a list of boxes over the world.

        The parameters have to be complete; later updates are seen.
        """
        self._device, self._rank = groups.device, groups.rank
        self._own = dict(_own_parts(chunks, groups))
        everyone: list[list[_Box]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(self._own))
        self._held: dict[str, list[tuple[int, _Box]]] = defaultdict(list)
        for rank, parts in enumerate(everyone):
            for part in parts:
                self._held[part.name].append((rank, part))
        self.kinds: Mapping[str, TensorKind] = {name: held[0][1].whole for name, held in self._held.items()}
        """Dtype and shape by global name; tables include the rows of vocabulary padding."""

    @torch.no_grad()
    def gather(self, names: Iterable[str], receiver: int | None = None) -> dict[str, Tensor] | None:
        """Gathers whole parameters by name, as new tensors on the device, on every rank or on one. Collective.

        Costs one broadcast (or one message to the receiver) from each rank that holds a part of any of them.

        Args:
            names: Names of the parameters; the same on all ranks.
            receiver: Rank that needs them, others get None; None: every rank does.
        """
        wanted = list(names)
        by_owner: dict[int, list[_Box]] = defaultdict(list)
        for rank, part in itertools.chain.from_iterable(self._held[name] for name in wanted):
            by_owner[rank].append(part)
        is_wanted = receiver in (None, self._rank)
        found: dict[str, Tensor] = {}
        if is_wanted:
            for name in wanted:
                dtype, shape = self.kinds[name]
                found[name] = torch.empty(shape, dtype=dtype, device=self._device)
        for owner, parts in sorted(by_owner.items()):  # in the same order on all ranks
            buffer = self._sent(owner, parts, receiver)
            if buffer is not None and is_wanted:
                for part, values in zip(parts, views(buffer, [part.kind for part in parts]), strict=True):
                    part.at.of(found[part.name]).copy_(values)
        return found if is_wanted else None

    def _sent(self, owner: int, parts: Sequence[_Box], receiver: int | None) -> Tensor | None:
        """Sends what one rank has; returns its [bytes] where they arrive."""
        is_mine = owner == self._rank
        if not (is_mine or receiver in (None, self._rank)):
            return None
        kinds = [part.kind for part in parts]
        buffer = torch.empty(buffer_bytes(kinds), dtype=torch.uint8, device=self._device)
        if is_mine:
            for part, place in zip(parts, views(buffer, kinds), strict=True):
                place.copy_(self._own[part].view(part.at.shape))
        if receiver is None:
            dist.broadcast(buffer, src=owner)
        elif is_mine and owner != receiver:
            dist.send(buffer, dst=receiver)
        elif owner != receiver:
            dist.recv(buffer, src=owner)
        return buffer


def _own_parts(chunks: Sequence[Any], groups: Groups) -> Iterable[tuple[_Box, Tensor]]:
    """Yields the boxes of which this rank has the main replica, with their elements as views."""
    for place in sharded_parameters([unwrap(chunk) for chunk in chunks], groups):
        if not is_written_here(place):
            continue
        axes = next(shards(place, place.key, place.data)).prepend_axis_num  # they number layers and experts
        for shard in whole_of(place, place.key, place.data):
            name = global_name(shard.key, shard.at.offset[:axes])
            whole = TensorKind(shard.data.dtype, tuple(shard.global_shape[axes:]))
            yield _Box(name, TensorSlice(shard.at.offset[axes:], shard.at.shape[axes:]), whole), shard.data
