"""Images of a sample, and of a microbatch: patches for the vision tower, and the positions of its features.

The tower turns `merge` x `merge` neighbouring patches of an image into one feature. A feature replaces the embedding of
one token, the placeholder. Features are numbered over all images of a sample (of a microbatch: over all its samples),
in the order of `grids`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor  # samples are read without torch


@dataclass(frozen=True)
class SampleImages:
    """Images of one sample of n tokens, which contains all tokens of each image."""

    pixels: NDArray[np.float32]
    """[patches, patch_size]: flattened patches of all images in order, as an image processor of transformers returns
    them in `pixel_values`."""
    grids: NDArray[np.int64]
    """[images, 3]: frames, rows and columns of each image, in patches (`image_grid_thw`)."""
    places: NDArray[np.int64]
    """[n]: number of the feature that replaces each token's embedding, counted in the sample; -1 for text."""
    axes: NDArray[np.int64]
    """[n, 3]: rotary positions (time, height, width) of each token, from 0 in the sample; from 0 in each document if
    data.isolate_documents separates the documents of a sample."""

    @property
    def next_position(self) -> int:
        """Returns the rotary position, on all axes, of a token of text that follows the sample."""
        return int(self.axes.max()) + 1


@dataclass(frozen=True)
class MicrobatchImages:
    """Images of one microbatch, at least one."""

    pixels: Tensor
    """[patches, patch_size] float32, on the CPU and never sliced: each rank copies the images that it encodes."""
    grids: Tensor
    """[images, 3] int64, on the CPU and never sliced."""
    places: Tensor
    """[batch, seq] int64: number of the feature that replaces the embedding, counted in the microbatch; -1 for text."""
    axes: Tensor
    """[batch, seq, 3] int64: rotary positions (time, height, width) in the document."""
    ends: Tensor | None = None
    """[batch, seq] int32, on the CPU and never sliced: index in the row after the last token that each token sees, for
    tokens of an image its end. None: no token sees a later one."""
    ahead: Tensor | None = None
    """[batch, seq, depths] int64: like `places`, for the token that each MTP depth reads; -1 beyond the end of the
    document. None without depths."""
