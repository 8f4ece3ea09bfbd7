"""Parts of global tensors, in the form in which ranks save and load them."""

from typing import NamedTuple

from torch import Tensor

from mtrain.base.tensor_slice import Sizes, TensorSlice


class Shard(NamedTuple):
    """One rank's part of a global tensor."""

    key: str
    global_shape: Sizes
    at: TensorSlice
    """Slice of the global tensor."""
    data: Tensor
    """Elements of the slice, contiguous, in any shape."""
    may_be_padded: bool = False
    """Whether the last rows of the tensor may be padding, with a number of rows that depends on the layout."""
