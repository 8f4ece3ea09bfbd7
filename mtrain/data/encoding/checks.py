"""Checks that records of every form share: known keys, texts and weights."""

import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.extras import ROUTED_EXPERTS
from mtrain.core.batch.choices import MAKERS, shaped_experts

IMAGE_KEYS = ("images", "image")
"""Columns that can hold the images of a record."""
_MEDIA = frozenset({*IMAGE_KEYS, "image_url", "video", "videos", "audio", "audios"})
"""Keys of images, video and audio in data for multimodal models."""
IMAGES_NEED = "images are read only in finetuning on conversations, for a model with model.vision"


def check_keys(record: dict[str, Any], known: Set[str], ignored: Set[str], prefix: str = "") -> None:
    """Refuses an unknown key: the model may need its value, so it is not dropped silently.

    Args:
        ignored: Keys that are dropped on purpose; a known key is never dropped.
        prefix: Beginning of the message, such as "messages[0] "; empty for the record itself.
    """
    unknown = next((key for key in record if key not in known and key not in ignored), None)
    if unknown in _MEDIA:
        why = IMAGES_NEED if unknown in IMAGE_KEYS else "neither video nor audio is read"
        raise DataError(
            f"{prefix}has the key {unknown!r}, but {why}; leave the record out, or name the key in data.ignore_keys to "
            "train on its text alone"
        )
    if unknown is not None:
        raise DataError(
            f"{prefix}has the key {unknown!r}, which is not read; known are {', '.join(sorted(known))}: remove it, or "
            "name it in data.ignore_keys to train without it"
        )


def check_text(text: object, name: str) -> str:
    """Returns the text, or raises DataError with `name`."""
    if text is None:
        raise DataError(f"{name} is null, but must be a string; write it, or remove the line")
    if not isinstance(text, str):
        raise DataError(f"{name} is of type {type(text).__name__}, but must be a string; put it in quotes")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} contains half a surrogate pair, which is not text; fix the escape sequence") from None
    return text


def check_weight(weight: object, name: str = "'weight'") -> float:
    """Returns the weight, which must be a finite number of at least 0."""
    # bool first: True is an int in Python
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise DataError(f"{name} is {weight!r}, but must be a finite number of at least 0; change it")
    return float(weight)


def token_extras(record: dict[str, Any], sizes: Mapping[str, tuple[int, ...]], num_tokens: int) -> NDArray[np.float32]:
    """Returns [num_tokens, columns]: one number a token in each column; a number of the whole sample is repeated.

    Numbers that are not finite are refused later, by a reader that knows file and record.

    Args:
        sizes: Key -> sizes of its value for each token, each number a column; () for one number per token. Not empty.
        num_tokens: Number of tokens in the sample. A list has as many numbers, or one less: without the first token,
            which nothing predicts; routed experts may lack the last one, which is not read.
    """
    columns: list[NDArray[np.float32]] = []
    for name, shape in sizes.items():
        # an inference engine writes null unless it was asked for experts
        if name not in record or (name == ROUTED_EXPERTS and record[name] is None):
            what = f"[tokens, layers, k]; {MAKERS}" if name == ROUTED_EXPERTS else "one number, or one per token"
            raise DataError(f"has no {name!r}, which data.extras names; give {what}")
        if name == ROUTED_EXPERTS:
            columns.extend(_experts(record[name], num_tokens, shape))
        elif not shape:
            columns.append(_token_extra(record[name], name, num_tokens))
        else:
            columns += [_token_extra(column, name, num_tokens) for column in _columns(record[name], name, shape[0])]
    return np.stack(columns, axis=1)


def _experts(value: object, num_tokens: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns [columns, num_tokens]: the experts of each token; -1 for the last one, whose own are not used."""
    try:
        values = shaped_experts(value, num_tokens, shape, "the record")
    except ValueError as fault:
        raise DataError(str(fault)) from None
    rows = np.full((num_tokens, math.prod(shape)), -1, np.float32)
    rows[: num_tokens - 1] = values.reshape(num_tokens - 1, -1)
    return rows.T


def _columns(value: object, name: str, width: int) -> list[list[Any]]:
    """Turns a list of `width` numbers a token into `width` lists of one number a token."""
    rows: list[Any] = value if isinstance(value, list) else [None]
    wrong = next((index for index, row in enumerate(rows) if not isinstance(row, list) or len(row) != width), None)
    if wrong is not None:
        raise DataError(
            f"{name!r} is not made of lists of {width} numbers (at token {wrong}), but data.extras names "
            f"{name}:{width}; give one list of {width} numbers per token"
        )
    return [[row[number] for row in rows] for number in range(width)]


def _token_extra(value: Any, name: str, num_tokens: int) -> NDArray[np.float32]:
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise DataError(f"{name!r} is not made of numbers; give one number, or a list with one per token")
    with np.errstate(over="ignore"):  # a number that float32 cannot hold becomes inf
        values = np.array([float(number) for number in numbers], np.float64).astype(np.float32)
    if not isinstance(value, list):
        return np.full(num_tokens, values[0])
    if len(values) == num_tokens - 1:
        return np.concatenate([np.zeros(1, np.float32), values])
    if len(values) != num_tokens:
        raise DataError(
            f"{name!r} has {len(values)} numbers, but the sample has {counted(num_tokens, 'token')}; give one number "
            f"per token, or {num_tokens - 1}, without the first"
        )
    return values
