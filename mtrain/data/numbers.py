"""Numbers that a user's program gives: lists, numpy arrays or tensors, accepted as they are or refused."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray


def whole_number(given: Any) -> int | None:
    """Returns the value as an int; None where it is a boolean, a float, or no number at all.

    Args:
        given: Any value; integers of numpy and tensors without dimensions count as numbers.
    """
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
    """Checks token ids; returns them as [n].

    Args:
        given: Sequence of token ids: a list, an array or a tensor.
        name: Name of the values in messages, such as "input_ids".
        size: Size of the vocabulary.

    Raises:
        ValueError: The value is no row of ids, or one of its elements is no id; names the element and its place.
    """
    values = _row(given, name)
    # nearly always all are plain ints, which numpy checks much faster than a loop
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

    Args:
        given: A number, or numbers in rows of equal lengths.
        name: Name of the value in messages, such as "weights".

    Raises:
        ValueError: An element is no number, rows differ in length, or the value is a tensor with a gradient.
    """
    if getattr(given, "requires_grad", False):
        raise ValueError(f"{name} is a tensor with a gradient, which would be dropped; give {name}.detach()")
    try:
        # tensors on a GPU and of bfloat16 cannot become arrays directly
        values = np.asarray(given.tolist() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as fault:
        raise ValueError(f"{name} is not made of numbers in rows of equal lengths ({fault}); give numbers") from None
    if values.dtype.kind in "biuf":
        return values
    # a text or a None is among the numbers: numpy has made texts or objects of all
    objects = np.asarray(given, dtype=object)
    for place in np.ndindex(objects.shape):
        if not isinstance(objects[place], numbers.Real | np.bool_):
            at = "".join(f"[{each}]" for each in place)
            raise ValueError(f"{name}{at} is {_shown(objects[place])}, but must be a number")
    try:
        return objects.astype(np.float64)
    except OverflowError:
        raise ValueError(f"{name} has a number that no float holds; give finite numbers") from None


def _row(given: Any, name: str) -> list[Any]:
    if hasattr(given, "tolist"):  # an array or a tensor
        given = given.tolist()
    is_row = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping | Set)
    if not is_row:
        raise ValueError(f"{name} is {_shown(given)}, but must be a row of token ids")
    return list(given)


def _shown(value: object) -> str:
    return f"{value!r:.40}"
