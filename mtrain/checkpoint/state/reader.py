"""Reads slices of global tensors into the state of each rank, from a checkpoint or from a Hugging Face folder.

Every rank maps the files and copies its slices straight to its device. An error on one rank is raised on all of them.
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
from mtrain.core.layers.sharded_parameters import ShardedParameter, held_rows, run_of, whole_of
from mtrain.core.ranks.init import on_all_ranks
from mtrain.core.state.shard import Shard

_NAMES_SHOWN = 8


class TensorInfo(Protocol):
    """Facts about a global tensor that are known without reading it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sizes: ...


class ReadTarget(NamedTuple):
    """A parameter that a rank reads from disk."""

    values: Tensor
    """Rows or whole parameter of this rank, in the dtype on disk; the parameter's own memory if the dtypes agree."""
    shards: list[Shard]


class GlobalTensors(Protocol):
    """Global tensors on disk, by key, read slice by slice."""

    @property
    def folder(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Key -> facts of each tensor."""

    @property
    def non_tensors(self) -> AbstractSet[str]:
        """Keys of saved objects that are not tensors."""

    def read(self, key: str, region: TensorSlice) -> Tensor:
        """Reads a region of a tensor; do not write to the result."""

    def expect(self, key: str, region: TensorSlice) -> None:
        """Asks the system to read ahead a region that will be read soon."""


def load_shards(
    saved: GlobalTensors,
    shards: Sequence[Shard],
    may_be_left: Callable[[str], bool],
    vocab_size: int,
    after_each: Callable[[int], None] = lambda number: None,
) -> None:
    """Compares keys, shapes and dtypes, then reads into `data` of each shard in place. Collective over the world.

    Args:
        shards: Shards that this rank needs, with data in the dtype on disk, on any device.
        may_be_left: Returns whether a key may stay unread; any other key that no rank needs is refused.
        vocab_size: Rows of a padded tensor that are tokens; further rows are padding.
        after_each: Called with the index of each shard that has been read, while the system reads the next one.

    Raises:
        DataError: The tensors are not those of the model, or a file is damaged; raised on all ranks.
    """
    firsts = {shard.key: shard for shard in reversed(shards)}
    # pipeline stages need different tensors
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, set(firsts))
    check_keys(saved, set().union(*everyone), may_be_left)
    shapes = {key: shard.global_shape for key, shard in firsts.items()}
    padded = {key for key, shard in firsts.items() if shard.may_be_padded}
    dtypes = {key: shard.data.dtype for key, shard in firsts.items()}
    on_all_ranks(lambda: check_shapes(saved, shapes, padded, vocab_size, dtypes))
    on_all_ranks(lambda: _read(saved, shards, after_each))  # also a barrier


def target_of(parameter: ShardedParameter, key: str, dtype: torch.dtype) -> ReadTarget:
    """Returns the memory and shards into which this rank reads a parameter: its rows if DP x CP divides it, otherwise
    the whole, in the parameter's own memory if the dtypes agree.

    Args:
        key: Key on disk.
        dtype: Dtype on disk.
    """
    own, held = parameter.data, held_rows(parameter.data)
    if held is not None:
        values = torch.empty(held.main.shape, dtype=dtype)
        return ReadTarget(values, list(run_of(parameter, key, values.view(-1), held.start, held.end)))
    values = own.detach() if own.dtype == dtype and own.is_contiguous() else torch.empty(own.shape, dtype=dtype)
    return ReadTarget(values, list(whole_of(parameter, key, values)))


@torch.no_grad()
def load_parameters(
    saved: GlobalTensors,
    targets: Mapping[Tensor, ReadTarget],
    may_be_left: Callable[[str], bool],
    vocab_size: int,
    use: Callable[[Tensor, Tensor], None],
) -> None:
    """Reads parameters one by one, in the order of their keys. Collective over the world.

    Args:
        may_be_left: See `load_shards`.
        use: Called with each parameter and the complete values of its target, while the system reads the next ones.
            Frees values outside the parameter afterwards.
    """
    owned = [(shard, parameter) for parameter, (_, shards) in targets.items() for shard in shards]
    owned.sort(key=lambda pair: (pair[0].key, pair[0].at.offset))  # reads neighbours on disk together
    num_missing = {parameter: len(shards) for parameter, (_, shards) in targets.items()}

    def after_each(number: int) -> None:
        parameter = owned[number][1]
        num_missing[parameter] -= 1
        if num_missing[parameter] == 0:
            values = targets[parameter].values
            use(parameter, values)
            if values.data_ptr() != parameter.data_ptr():
                values.untyped_storage().resize_(0)  # so that memory never holds the model twice

    load_shards(saved, [shard for shard, _ in owned], may_be_left, vocab_size, after_each)


@torch.no_grad()
def _read(saved: GlobalTensors, shards: Sequence[Shard], after_each: Callable[[int], None]) -> None:
    """Reads the shards; rows that the checkpoint lacks are padding and become zero."""
    for number, (shard, following) in enumerate(zip_longest(shards, shards[1:])):
        if following is not None:  # the system reads it while this thread copies the current one
            saved.expect(following.key, following.at)
        target = shard.data.view(shard.at.shape)  # a shard's data is flat
        if shard.may_be_padded:
            # a table padded for another tp may end before this rank's rows
            rows = max(0, saved.tensors[shard.key].shape[0] - shard.at.offset[0])
            target[rows:].zero_()
            target = target[:rows]
        if target.numel():
            target.copy_(saved.read(shard.key, TensorSlice(shard.at.offset, tuple(target.shape))))
        after_each(number)


def check_keys(saved: GlobalTensors, needed: AbstractSet[str], may_be_left: Callable[[str], bool]) -> None:
    """Compares the keys on disk with those that the whole model needs.

    Args:
        may_be_left: Returns whether a key on disk may stay unread.
    """
    saved_keys = saved.tensors.keys() | saved.non_tensors
    left = {key for key in saved_keys - needed if not may_be_left(key)}
    faults = []
    if needed - saved_keys:
        faults.append(f"lacks {_shown(set(needed - saved_keys))}, which the model has")
    if left:
        faults.append(f"has {_shown(left)}, which the model does not have")
    if faults:
        error = DataError(f"{saved.folder} {' and '.join(faults)}; use the model that it was saved from")
        error.on_every_rank = True  # makes one rank print it
        raise error


def check_shapes(
    saved: GlobalTensors,
    shapes: Mapping[str, Sizes],
    padded: Collection[str],
    vocab_size: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Compares the shapes of whole tensors, and their dtypes.

    Args:
        saved: Tensors on disk, with all keys of `shapes`.
        padded: Keys of tables that may have more rows than `vocab_size`.
        dtypes: Dtypes that the run reads; None skips the comparison.
    """
    faults = []
    for key, shape in sorted(shapes.items()):
        if key in saved.non_tensors:
            faults.append(f"{key} is not a tensor")
            continue
        info = saved.tensors[key]
        # the number of padding rows depends on tp, but no table has fewer rows than the vocabulary
        rows_suffice = key in padded and info.shape[:1] >= (vocab_size,) and info.shape[1:] == shape[1:]
        if info.shape != shape and not rows_suffice:
            faults.append(f"{key} has shape {list(info.shape)}, but the model needs {list(shape)}")
        if dtypes is not None and info.dtype != dtypes[key]:
            faults.append(f"{key} is {info.dtype}, but the run needs {dtypes[key]}")
    if faults:
        more = f" and {len(faults) - _NAMES_SHOWN} more" if len(faults) > _NAMES_SHOWN else ""
        raise DataError(
            f"{saved.folder}: {'; '.join(faults[:_NAMES_SHOWN])}{more}; use the model that it was saved from"
        )


def _shown(keys: set[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
