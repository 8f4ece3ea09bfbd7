"""Numbers from a user, accepted unchanged or refused: lists, numpy arrays, tensors, a teacher's cache."""

import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


def whole_number(given: Any) -> int | None:
    """Returns an int, also from an integer of numpy or a tensor without dimensions; None for a boolean, a float or
    anything else."""
    if type(given) is int:
        return given
    # True is an int in Python, and a tensor of one element may stand for its element
    if isinstance(given, bool) or "bool" in str(getattr(given, "dtype", "")) or getattr(given, "ndim", None):
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def token_ids(given: Any, name: str, size: int) -> NDArray[np.int64]:
    """Checks a list, an array or a tensor of token ids; returns them as [n].

    Raises:
        ValueError: The value is not a row of ids, or an element is not an id; names the element and its position.
    """
    # no subclass: one with a mask would pass what it hides
    if type(given) is np.ndarray and given.ndim == 1 and given.dtype.kind in "iu":
        whole: NDArray[Any] = given
        if not len(whole) or (whole.min() >= 0 and whole.max() < size):
            return whole.astype(np.int64)
    values = _row(given, name)
    # numpy checks plain ints much faster than a loop
    if {*map(type, values)} <= {int}:
        try:
            found = np.array(values, dtype=np.int64)
            if not len(found) or (found.min() >= 0 and found.max() < size):
                return found
        except OverflowError:
            pass  # the loop below finds the place
    ids = []
    for place, each in enumerate(values):
        number = whole_number(each)
        if number is None or not 0 <= number < size:
            kind = "" if number is not None else f" ({type(each).__name__})"
            raise ValueError(
                f"{name}[{place}] is {_shown(each)}{kind}, but must be a whole number from 0 to {size - 1}"
            )
        ids.append(number)
    return np.array(ids, dtype=np.int64)


def real_numbers(given: Any, name: str) -> NDArray[Any]:
    """Returns an array of numbers, of the dtype that they have; booleans stay booleans.

    Raises:
        ValueError: An element is not a number, rows differ in length, or the value is a tensor with a gradient.
    """
    if getattr(given, "requires_grad", False):
        raise ValueError(f"{name} is a tensor with a gradient, which would be dropped; give {name}.detach()")
    # tensors on a GPU and of bfloat16 cannot become arrays directly, and an array with a mask would lose the mask
    if hasattr(given, "detach") or isinstance(given, np.ma.MaskedArray):
        given = listed(given, name)
    try:
        values = np.asarray(given)
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{name} is not made of numbers in rows of equal lengths ({fault}); give numbers") from None
    if values.dtype.kind in "biuf":
        return values
    # a text or a None is among the numbers: numpy has made texts or objects of all
    objects = np.asarray(given, dtype=object)
    for place in np.ndindex(objects.shape):
        if not isinstance(objects[place], numbers.Real | np.bool_):
            at = "".join(f"[{index}]" for index in place)
            raise ValueError(f"{name}{at} is {_shown(objects[place])}, but must be a number")
    try:
        return objects.astype(np.float64)
    except OverflowError:
        raise ValueError(f"{name} has a number that no float holds; give finite numbers") from None


def listed(given: Any, name: str) -> Any:
    """Returns the numbers of an array or a tensor as lists, or as one number; ValueError if torch cannot read them."""
    try:
        return given.tolist()
    except RuntimeError:
        raise ValueError(
            f"{name} is a tensor whose numbers cannot be read, as of a sparse, a nested or a meta tensor; give a dense "
            "one, such as torch.tensor([1, 2])"
        ) from None


def _row(given: Any, name: str) -> list[Any]:
    if hasattr(given, "tolist"):  # an array or a tensor
        given = listed(given, name)
    is_row = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping | Set)
    if not is_row:
        raise ValueError(f"{name} is {_shown(given)}, but must be a row of token ids")
    return list(given)


def _shown(value: object) -> str:
    return f"{value!r:.40}"


TOP_K_IDS = "topk_ids"
"""Name of the extra with the teacher's most likely tokens."""
TOP_K_LOGPROBS = "topk_logprobs"
"""Name of the extra with their log-probabilities, in the same order."""

_MOST_MASS = 1.01
"""Largest sum of the probabilities of a token: a teacher of 8 bits precision is off by less."""
_ROWS_AT_A_TIME = 2**16


class TopKFault(NamedTuple):
    """The first token whose numbers cannot be those of a teacher."""

    row: int
    why: str


def top_k_fault(
    numbers: NDArray[np.float32], names: Sequence[str], is_counted: NDArray[np.bool_], vocab_size: int
) -> TopKFault | None:
    """Says what is wrong with extras of the names above, [tokens, columns] finite numbers; None if nothing is.

    Names of the columns are those of `mtrain.config.extras.columns`. Tokens that no loss counts may have any token ids.
    """
    ids, logprobs = ([place for place, each in enumerate(names) if each.startswith(f"{key}[")] for key in _KEYS)
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
        f"{TOP_K_IDS} that are no token ids: whole numbers from 0 to {vocab_size - 1} are needed "
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
