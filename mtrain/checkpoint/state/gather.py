"""Whole parameters and gradients under their global names: all at once, for comparing layouts of small models, or a
few at a time in bounded memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
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

    Call it between the schedule and the optimizer's update, which clips in place. Gathers the gradients first where
    each rank has those of its own part alone.
    """
    # buffers and frozen parameters have none and are left out
    return _shards(sharded.chunks, groups, sharded.whole_gradients().get)


def gather_whole(shards: Sequence[Shard]) -> dict[str, Tensor] | None:
    """Returns global tensors by name on rank 0; None elsewhere. One gather of objects to rank 0 over the world."""
    # pickled and sent to rank 0, where the whole model has to fit: for comparisons of small models
    everyone: list[list[_Sent]] | None = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object([_Sent.of(shard) for shard in shards], everyone)
    return None if everyone is None else assemble(sent.shard() for rank in everyone for sent in rank)


class _Sent(NamedTuple):
    """A shard as bytes: tensors would be pickled as files, which for hundreds takes longer than a step."""

    key: str
    global_shape: tuple[int, ...]
    at: TensorSlice
    dtype: torch.dtype
    content: NDArray[np.uint8]

    @classmethod
    def of(cls, shard: Shard) -> _Sent:
        return cls(shard.key, tuple(shard.global_shape), shard.at, shard.data.dtype, _bits(shard.data).numpy())

    def shard(self) -> Shard:
        values = torch.from_numpy(self.content).view(self.dtype).view(self.at.shape)
        return Shard(self.key, self.global_shape, self.at, values)


def assemble(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Assembles whole tensors from the shards of all ranks.

    Raises:
        ValueError: Two ranks hold different values for the same element, or no rank holds an element.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for shard in shards:
        if shard.key not in whole:
            whole[shard.key] = torch.zeros(shard.global_shape, dtype=shard.data.dtype)
            # zeros are a value too, so the filled part is recorded separately
            filled[shard.key] = torch.zeros(shard.global_shape, dtype=torch.bool)
        # Replicas are compared where an earlier shard has been: ranks that silently differ are an error of their own.
        there, known = shard.at.of(whole[shard.key]), shard.at.of(filled[shard.key])
        if not torch.equal(_bits(there[known]), _bits(shard.data[known])):
            raise ValueError(f"replicas of {shard.key} at {shard.at.offset} differ between ranks")
        there.copy_(shard.data)
        known.fill_(True)
    # a gap would silently compare as zeros
    missing = [name for name, mask in filled.items() if not mask.all()]
    if missing:
        raise ValueError(f"no rank holds all of {', '.join(missing)}")
    return whole


def _bits(values: Tensor) -> Tensor:
    """Returns [bytes]: the same NaN on two ranks is no difference between them, although it is not equal to itself."""
    return values.flatten().view(torch.uint8)


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
        """Returns the kind of the box."""
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
        """Gathers whole parameters, as new tensors on the device, on every rank or on one. Collective over the world.

        Costs one broadcast (or one message to the receiver) from each rank that holds a part of any of them.

        Args:
            names: Names of the parameters; the same on all ranks.
            receiver: Rank that needs them; None: every rank does.

        Returns:
            Tensors by name; None on ranks that do not need them.
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
