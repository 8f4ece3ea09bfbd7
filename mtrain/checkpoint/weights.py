"""Weights of a checkpoint as numpy arrays: no ranks, no model, no configuration."""

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
"""Prefixes of keys that are no weights."""
_TE_STATE = "._extra_state/"


class _Weights(Mapping[str, NDArray[np.float32]]):
    """Global name -> array; each is read when it is accessed."""

    def __init__(self, tensors: CheckpointTensors, vocab_size: int, held: contextlib.ExitStack) -> None:
        self._tensors, self._vocab_size = tensors, vocab_size
        # A caller has no `with` block around a mapping, and may read arrays as long as it exists: so the lock that
        # keeps other processes from deleting the files ends with the mapping.
        weakref.finalize(self, held.close)
        # _extra_state is TransformerEngine's, an object instead of numbers
        self._names = sorted(key for key in tensors.tensors if not key.startswith(_BESIDE) and _TE_STATE not in key)

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        if name not in self._names:
            raise KeyError(name)
        # prefer the float32 main weights: bf16 and fp16 weights are rounded from them
        key = _MAIN + name if _MAIN + name in self._tensors.tensors else name
        shape = self._tensors.tensors[key].shape
        if name in PADDED_TABLES:
            # the number of padding rows depends on tp, so keeping them would make the result depend on the layout
            shape = (min(shape[0], self._vocab_size), *shape[1:])
        values: NDArray[np.float32] = self._tensors.read(key, TensorSlice.whole(shape)).float().numpy()
        return values.copy()  # else a view of the mapped file, which must not be written to

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_weights(path: Path | str) -> Mapping[str, NDArray[np.float32]]:
    """Returns the weights of a checkpoint by global name, whatever layout has saved it.

    No run deletes the checkpoint as long as the mapping exists.

    Args:
        path: Folder of a checkpoint, or of a run: then its newest whole checkpoint.

    Returns:
        Mapping of names to float32 arrays of the whole tensors, read on access: the main weights where the checkpoint
        has them (bf16, fp16), else the model's weights. Layers of one kind are one tensor: `decoder.layers.*` arrays
        begin with an axis of layers. Padding rows of the vocabulary are left out.

    Raises:
        DataError: There is no checkpoint, or a byte of it differs from what was saved.
        MachineError: The checkpoint cannot be read.
    """
    entry = checkpoint_at(Path(path)).entry
    if entry is None:
        raise DataError(f"{path} holds no checkpoint")
    with contextlib.ExitStack() as held:
        held.enter_context(reading(entry))  # before the first byte is read
        # all bytes, before the first array: later reads are views of the files, without a check of their own
        verify_files(entry, entry.manifest.files, num_threads=1)
        tensors, vocab_size = CheckpointTensors(entry.path), read_state(entry.path).vocab_size
        return _Weights(tensors, vocab_size, held.pop_all())  # after an error the lock is released here
