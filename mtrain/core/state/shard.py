"""Parts of global tensors, as ranks hold, save and load them."""

from typing import NamedTuple

from torch import Tensor

from mtrain.base.tensor_slice import Sizes, TensorSlice


class Shard(NamedTuple):
    """Part of a global tensor that a rank holds."""

    key: str
    global_shape: Sizes
    at: TensorSlice
    """Slice of the global tensor."""
    data: Tensor
    """Elements of the slice, contiguous, in any shape."""
    may_be_padded: bool = False
    """Whether the tensor's last rows are padding, whose number depends on the layout."""
