"""Reads slices of global tensors into the state of each rank, from a checkpoint or from a Hugging Face folder.

Every rank maps the files and copies what it needs, straight to where it computes. An error on one rank is raised on all
of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes, TensorSlice
from mtrain.core.ranks.init import on_all_ranks
from mtrain.core.state.shard import Shard

_NAMES_SHOWN = 8


class TensorInfo(Protocol):
    """Facts about a global tensor that need no reading."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sizes: ...


class Wanted(NamedTuple):
    """A parameter that a rank reads from disk."""

    values: Tensor
    """Tensor of the parameter's shape, in the dtype on disk: the parameter's own memory if the dtypes agree."""
    shards: list[Shard]


class GlobalTensors(Protocol):
    """Global tensors on disk, by key, of which slices are read."""

    @property
    def folder(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Returns key -> facts of each tensor."""

    @property
    def others(self) -> AbstractSet[str]:
        """Returns the keys of everything that is not a tensor."""

    def read(self, key: str, wanted: TensorSlice) -> Tensor:
        """Reads one slice; not to be written to."""

    def expect(self, key: str, wanted: TensorSlice) -> None:
        """Lets the system read a slice that is needed soon."""


def load_shards(
    saved: GlobalTensors,
    shards: Sequence[Shard],
    may_be_left: Callable[[str], bool],
    vocab_size: int,
    after_each: Callable[[int], None] = lambda number: None,
) -> None:
    """Reads into `data` of each shard, in place, after everything has been compared. Collective over the world.

    Args:
        shards: Shards that this rank needs, with data of the dtype that was saved, on any device.
        may_be_left: Says which keys of the checkpoint may stay unread; any other that no rank asks for is refused.
        vocab_size: Least number of rows of a padded tensor; further rows are padding.
        after_each: Called with the number of each shard that has been read, while the system reads the next one.
    """
    firsts = {shard.key: shard for shard in reversed(shards)}
    # stages ask for different tensors
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, set(firsts))
    check_keys(saved, set().union(*everyone), may_be_left)
    shapes = {key: shard.global_shape for key, shard in firsts.items()}
    padded = {key for key, shard in firsts.items() if shard.may_be_padded}
    dtypes = {key: shard.data.dtype for key, shard in firsts.items()}
    on_all_ranks(lambda: check_shapes(saved, shapes, padded, vocab_size, dtypes))
    on_all_ranks(lambda: _read(saved, shards, after_each))  # also a barrier


def memory_for(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for the values of a parameter: the parameter itself if dtypes agree, which saves a copy."""
    is_held = parameter.dtype == dtype and parameter.is_contiguous()
    return parameter.detach() if is_held else torch.empty(parameter.shape, dtype=dtype)


@torch.no_grad()
def load_parameters(
    saved: GlobalTensors,
    wanted: Mapping[Tensor, Wanted],
    may_be_left: Callable[[str], bool],
    vocab_size: int,
    use: Callable[[Tensor, Tensor], None],
) -> None:
    """Reads one parameter after another in the order of their keys. Collective over the world.

    Args:
        may_be_left: See `load_shards`.
        use: Called with each parameter and its complete values, while the system reads the next ones; values outside
            the parameter are freed afterwards.
    """
    owned = [(shard, parameter) for parameter, (_, shards) in wanted.items() for shard in shards]
    owned.sort(key=lambda each: (each[0].key, each[0].at.offset))  # neighbours on disk are read together
    num_missing = {parameter: len(shards) for parameter, (_, shards) in wanted.items()}

    def after_each(number: int) -> None:
        parameter = owned[number][1]
        num_missing[parameter] -= 1
        if num_missing[parameter] == 0:
            values = wanted[parameter].values
            use(parameter, values)
            if values.data_ptr() != parameter.data_ptr():
                values.untyped_storage().resize_(0)  # so that no whole model exists twice

    load_shards(saved, [shard for shard, _ in owned], may_be_left, vocab_size, after_each)


@torch.no_grad()
def _read(saved: GlobalTensors, shards: Sequence[Shard], after_each: Callable[[int], None]) -> None:
    """Reads the shards; rows that the checkpoint does not have are padding, and zero."""
    for number, (shard, following) in enumerate(zip_longest(shards, shards[1:])):
        if following is not None:  # the system reads it while this one is copied
            saved.expect(following.key, following.at)
        target = shard.data.view(shard.at.shape)  # a shard's data is flat
        if shard.may_be_padded:
            # the table on disk may be padded for another tp and end before this rank's rows
            rows = max(0, saved.tensors[shard.key].shape[0] - shard.at.offset[0])
            target[rows:].zero_()
            target = target[:rows]  # a view: what follows stays zero
        if target.numel():
            target.copy_(saved.read(shard.key, TensorSlice(shard.at.offset, tuple(target.shape))))
        after_each(number)


def check_keys(saved: GlobalTensors, asked: AbstractSet[str], may_be_left: Callable[[str], bool]) -> None:
    """Compares names of tensors with the keys that the whole model has.

    Args:
        may_be_left: Says which keys of the checkpoint may stay unread.
    """
    there = saved.tensors.keys() | saved.others
    left = {key for key in there - asked if not may_be_left(key)}
    faults = []
    if asked - there:
        faults.append(f"lacks {_shown(set(asked - there))}, which the model has")
    if left:
        faults.append(f"holds {_shown(left)}, which the model does not have")
    if faults:
        error = DataError(f"{saved.folder} {' and '.join(faults)}; use the model that it was saved from")
        error.on_every_rank = True  # all ranks find the same; one of them prints it
        raise error


def check_shapes(
    saved: GlobalTensors,
    shapes: Mapping[str, Sizes],
    padded: Collection[str],
    vocab_size: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Compares shapes of whole tensors by key, and the dtypes as which the run reads them, if they are given.

    Args:
        saved: Tensors on disk; has all keys.
        padded: Keys of tables that may have more rows than the vocabulary, which has `vocab_size`.
    """
    faults = []
    for key, wanted in sorted(shapes.items()):
        if key in saved.others:
            faults.append(f"{key} is not a tensor")
            continue
        there = saved.tensors[key]
        # tp decides about padding rows: on disk there may be more or fewer, but never fewer than the vocabulary
        rows_suffice = key in padded and there.shape[:1] >= (vocab_size,) and there.shape[1:] == wanted[1:]
        if there.shape != wanted and not rows_suffice:
            faults.append(f"{key} has shape {list(there.shape)}, but the model needs {list(wanted)}")
        if dtypes is not None and there.dtype != dtypes[key]:
            faults.append(f"{key} is {there.dtype}, but the run needs {dtypes[key]}")
    if faults:
        more = f" and {len(faults) - _NAMES_SHOWN} more" if len(faults) > _NAMES_SHOWN else ""
        raise DataError(
            f"{saved.folder}: {'; '.join(faults[:_NAMES_SHOWN])}{more}; use the model that it was saved from"
        )


def _shown(keys: set[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
