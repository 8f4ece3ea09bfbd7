"""Reads a checkpoint's weights as numpy arrays, without ranks, model or configuration."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.arch.parameters import PADDED_TABLES
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.checkpoint.format.reader import CheckpointTensors
from mtrain.checkpoint.store.directory import checkpoint_at, reading, verify_files
from mtrain.checkpoint.store.manifest import read_state

_MAIN = "optimizer.state.param."
_BESIDE = ("optimizer.", "rng")
"""Prefixes of keys other than weights."""
_TE_STATE = "._extra_state/"


class _Weights(Mapping[str, NDArray[np.float32]]):
    """Global name -> array; each is read when it is accessed."""

    def __init__(self, tensors: CheckpointTensors, vocab_size: int, resources: contextlib.ExitStack) -> None:
        self._tensors, self._vocab_size = tensors, vocab_size
        # callers have no `with` block and may read arrays as long as the mapping exists, so the lock that keeps other
        # processes from deleting the files ends with the mapping
        weakref.finalize(self, resources.close)
        # TransformerEngine's _extra_state is a pickled object
        self._names = sorted(key for key in tensors.tensors if not key.startswith(_BESIDE) and _TE_STATE not in key)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        if name not in self._names:
            raise KeyError(name)
        # prefers the float32 main weights, from which bf16 and fp16 weights are rounded
        key = _MAIN + name if _MAIN + name in self._tensors.tensors else name
        shape = self._tensors.tensors[key].shape
        if name in PADDED_TABLES:
            # without padding rows, whose number depends on tp
            shape = (min(shape[0], self._vocab_size), *shape[1:])
        values: NDArray[np.float32] = self._tensors.read(key, TensorSlice.whole(shape)).float().numpy()
        return values.copy()  # or the caller could write to the mapped file

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_weights(path: Path | str) -> Mapping[str, NDArray[np.float32]]:
    """Returns the weights of a checkpoint by global name, whatever layout saved it.

    No run deletes the checkpoint as long as the mapping exists.

    Args:
        path: Folder of a checkpoint, or of a run, whose newest whole checkpoint is read.

    Returns:
        Mapping of names to float32 arrays of whole tensors, read on access: the main weights if the checkpoint has them
        (bf16, fp16), else the model's weights. `decoder.layers.*` arrays stack layers of one kind along their first
        axis. Vocabulary padding is left out.

    Raises:
        DataError: The path has no checkpoint, or a byte differs from what was saved.
        MachineError: The checkpoint cannot be read.
    """
    entry = checkpoint_at(Path(path)).entry
    if entry is None:
        raise DataError(f"{path} has no checkpoint; name a checkpoint or a run folder")
    with contextlib.ExitStack() as resources:
        resources.enter_context(reading(entry))  # before the first byte is read
        # verifies all bytes now, because later reads of the mapped files have no check
        verify_files(entry, entry.manifest.files, num_threads=1)
        tensors, vocab_size = CheckpointTensors(entry.path), read_state(entry.path).vocab_size
        return _Weights(tensors, vocab_size, resources.pop_all())  # the block releases the lock only after an error
