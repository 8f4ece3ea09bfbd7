"""Checks numbers from a user (lists, numpy arrays, tensors, a teacher's cache): accepted unchanged, or refused."""

import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def whole_number(value: Any) -> int | None:
    """Returns an integer of Python, numpy or a 0-dimensional tensor; None for anything else, such as a boolean."""
    if type(value) is int:
        return value
    # True is an int in Python, and a tensor of one element can convert to its element
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or getattr(value, "ndim", None):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def token_ids(value: Any, name: str, size: int) -> NDArray[np.int64]:
    """Checks a list, an array or a tensor of token ids; returns [n] int64.

    Raises:
        ValueError: The value is not a row of ids, or an element is not an id; names the element and its position.
    """
    # not a subclass, since a masked array could pass with invalid ids hidden
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iu":
        whole: NDArray[Any] = value
        if not len(whole) or (whole.min() >= 0 and whole.max() < size):
            return whole.astype(np.int64)
    values = _row(value, name)
    # numpy checks plain ints much faster than a loop
    if {*map(type, values)} <= {int}:
        try:
            array = np.array(values, dtype=np.int64)
            if not len(array) or (array.min() >= 0 and array.max() < size):
                return array
        except OverflowError:
            pass  # the loop below finds the element
    ids = []
    for index, element in enumerate(values):
        number = whole_number(element)
        if number is None or not 0 <= number < size:
            kind = "" if number is not None else f" ({type(element).__name__})"
            raise ValueError(
                f"{name}[{index}] is {_shown(element)}{kind}, but must be a whole number from 0 to {size - 1}"
            )
        ids.append(number)
    return np.array(ids, dtype=np.int64)


def real_numbers(value: Any, name: str) -> NDArray[Any]:
    """Returns an array of numbers in their own dtype; booleans stay booleans.

    Raises:
        ValueError: An element is not a number, rows differ in length, or the value is a tensor with a gradient.
    """
    if getattr(value, "requires_grad", False):
        raise ValueError(f"{name} is a tensor with a gradient, which would be dropped; give {name}.detach()")
    # np.asarray fails for tensors on a GPU or of bfloat16, and drops the mask of a masked array
    if hasattr(value, "detach") or isinstance(value, np.ma.MaskedArray):
        value = listed(value, name)
    try:
        values = np.asarray(value)
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{name} is not made of numbers in rows of equal lengths ({fault}); give numbers") from None
    if values.dtype.kind in "biuf":
        return values
    # some element is a text or None, so numpy has turned all of them into texts or objects
    objects = np.asarray(value, dtype=object)
    for position in np.ndindex(objects.shape):
        if not isinstance(objects[position], numbers.Real | np.bool_):
            at = "".join(f"[{index}]" for index in position)
            raise ValueError(f"{name}{at} is {_shown(objects[position])}, but must be a number")
    try:
        return objects.astype(np.float64)
    except OverflowError:
        raise ValueError(f"{name} has a number that no float holds; give finite numbers") from None


def listed(value: Any, name: str) -> Any:
    """Returns the numbers of an array or a tensor as lists, or as one number; ValueError if torch cannot read them."""
    try:
        return value.tolist()
    except RuntimeError:
        raise ValueError(
            f"{name} is a tensor whose numbers cannot be read, such as a sparse, nested or meta tensor; give a dense "
            "one, such as torch.tensor([1, 2])"
        ) from None


def _row(value: Any, name: str) -> list[Any]:
    if hasattr(value, "tolist"):  # an array or a tensor
        value = listed(value, name)
    is_row = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping | Set)
    if not is_row:
        raise ValueError(f"{name} is {_shown(value)}, but must be a row of token ids")
    return list(value)


def _shown(value: object) -> str:
    return f"{value!r:.40}"


TOP_K_IDS = "topk_ids"
"""Name of the extra with the teacher's most likely tokens."""
TOP_K_LOGPROBS = "topk_logprobs"
"""Name of the extra with the log-probabilities of these tokens."""

_MOST_MASS = 1.01
"""Largest sum of probabilities accepted for a token; even a teacher in 8-bit precision is off by less."""
_ROWS_AT_A_TIME = 2**16


class TopKFault(NamedTuple):
    """The first token with numbers that no teacher can have given."""

    row: int
    why: str


def top_k_fault(
    numbers: NDArray[np.float32], names: Sequence[str], is_counted: NDArray[np.bool_], vocab_size: int
) -> TopKFault | None:
    """Returns the first fault in the columns of TOP_K_IDS and TOP_K_LOGPROBS, or None.

    Args:
        numbers: Finite numbers, [tokens, columns].
        names: Names of the columns, as in `mtrain.config.extras.columns`.
        is_counted: Tokens that a loss counts, [tokens]; only they need different ids and a plausible mass.
    """
    ids, logprobs = ([index for index, name in enumerate(names) if name.startswith(f"{key}[")] for key in _KEYS)
    if not ids and not logprobs:
        return None
    for start in range(0, len(numbers), _ROWS_AT_A_TIME):  # a cache may be larger than memory
        rows = slice(start, start + _ROWS_AT_A_TIME)
        for is_bad, why in _judged(numbers[rows, ids], numbers[rows, logprobs], is_counted[rows], vocab_size):
            if is_bad.any():
                return TopKFault(start + int(np.argmax(is_bad)), why)
    return None


_KEYS = (TOP_K_IDS, TOP_K_LOGPROBS)


def _judged(
    ids: NDArray[np.float32], logprobs: NDArray[np.float32], is_counted: NDArray[np.bool_], vocab_size: int
) -> Iterator[tuple[NDArray[np.bool_], str]]:
    is_id = (ids == np.floor(ids)) & (ids >= 0) & (ids < vocab_size)
    yield (
        ~is_id.all(axis=1),
        f"{TOP_K_IDS} that are not token ids: whole numbers from 0 to {vocab_size - 1} are needed "
        f"(model.vocab_size={vocab_size}), even where the mask is 0; use a teacher with the model's own tokenizer",
    )
    ordered = np.sort(ids, axis=1)
    yield (
        (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) & is_counted,
        f"the same token twice in {TOP_K_IDS}; give each token once, and if the teacher has fewer, any others with "
        f"{TOP_K_LOGPROBS} of -10000",
    )
    mass = np.exp(np.minimum(logprobs, 1.0), dtype=np.float64).sum(axis=1)
    yield (
        (mass > _MOST_MASS) & is_counted,
        f"{TOP_K_LOGPROBS} whose probabilities add up to more than 1; give logarithms (to base e) of the softmax over "
        "the teacher's whole vocabulary, not logits",
    )
