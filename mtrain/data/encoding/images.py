"""Images of a record: their positions in its messages, and their content.

A part of a message's content can name its image: {"type": "image", "path": ...}. The images of a column (`images`, or
`image` for a single one) belong, in order, to the placeholders: `<image>` in a text, or a part without an image.
"""

import base64
import binascii
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file
from mtrain.core.batch.sample import EncodedImage
from mtrain.data.encoding.checks import IMAGE_KEYS
from mtrain.data.formats.file_state import is_settled, state_of
from mtrain.hf.images import ImageProcessor

PLACEHOLDER = "<image>"
IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images."""
ReadImage = Callable[[Mapping[str, Any], str], EncodedImage]
"""Reads the image of a part (part, name of the part in messages)."""
_SOURCES = ("image", "path", "url", "bytes", "base64", "image_url")
_MOST_BYTES = 1 << 28
"""Largest image file."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)


def with_column(record: dict[str, Any]) -> dict[str, Any]:
    """Moves the images of a column to their placeholders in the messages; raises DataError if the counts differ."""
    columns = [name for name in IMAGE_KEYS if name in record]
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return record  # refused later, by the reader of messages
    if len(columns) > 1:
        raise DataError(f"has both {' and '.join(map(repr, columns))}, two columns of images; keep one")
    if not columns and any(map(_has_own_images, messages)):
        return record  # if parts have their own images, `<image>` is ordinary text
    images = record[columns[0]] if columns else []
    images = images if isinstance(images, list) else [images]
    contents = [_parts(message.get("content")) for message in messages]
    count = sum(map(_is_place, (part for content in contents if isinstance(content, list) for part in content)))
    if count != len(images):
        raise DataError(
            f"has {len(images)} image(s) in {columns[0] if columns else 'images'!r}, but {count} placeholder(s) in its "
            f"messages ({PLACEHOLDER} in a text, or a part of type image without an image); make the counts equal"
        )
    left = iter(images)
    filled = [
        message if not isinstance(parts, list) else {**message, "content": [_with_image(part, left) for part in parts]}
        for message, parts in zip(messages, contents)
    ]
    return {**{key: value for key, value in record.items() if key not in columns}, "messages": filled}


def has_images(message: object) -> bool:
    """Says whether a part of a message is an image."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type") in IMAGE_TYPES for part in parts)


def _has_own_images(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(_source_keys, content))


def _parts(content: object) -> object:
    """Splits texts at placeholders; a text without any stays as it is."""
    if isinstance(content, str):
        return list(_pieces(content)) if PLACEHOLDER in content else content
    if not isinstance(content, list):
        return content
    return [piece for part in content for piece in (_pieces(part["text"]) if _is_placed_text(part) else (part,))]


def _is_placed_text(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return isinstance(text, str) and PLACEHOLDER in text


def _pieces(text: str) -> Iterator[dict[str, str]]:
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            yield {"type": "image"}
        if piece:
            yield {"type": "text", "text": piece}


def _is_place(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and not _source_keys(part)


def _with_image(part: Any, left: Iterator[Any]) -> Any:
    return {**part, "image": next(left)} if _is_place(part) else part


def _source_keys(part: object) -> list[str]:
    is_image = isinstance(part, dict) and part.get("type") in IMAGE_TYPES
    return [key for key in _SOURCES if key in part] if is_image and isinstance(part, dict) else []


def image_reader(processor: ImageProcessor, folder: Path) -> ReadImage:
    """Returns the reader of images in records of a file in `folder`."""
    return partial(_read, processor, folder)


def content_of(part: Mapping[str, Any], name: str, folder: Path) -> tuple[bytes, str | None, Mapping[str, int] | None]:
    """Returns the content of the image of a part and, if it is in a file, the path and the state of that file, as in
    `EncodedImage`; raises DataError if there is none, or if it cannot be read."""
    source = _source(part, name)
    if isinstance(source, bytes):
        return source, None, None
    content, state = _file(folder / source, name)
    return content, source, state


def _read(processor: ImageProcessor, folder: Path, part: Mapping[str, Any], name: str) -> EncodedImage:
    source, file, state = content_of(part, name, folder)
    name = name if file is None else f"{name}: {file}"
    try:
        processor.check(source)
        frames, rows, columns = map(int, processor.patches(source).grid)
    except DataError as fault:
        raise DataError(f"{name} {fault}") from None
    return EncodedImage(source, (frames, rows, columns), file, state)


def _source(part: Mapping[str, Any], name: str) -> bytes | str:
    """Returns the content of an image, or the path of its file."""
    keys = _source_keys(part)
    if unknown := sorted(part.keys() - {"type", *keys}):
        raise DataError(f"{name} has the key {unknown[0]!r}, which an image cannot have; remove it")
    if set(keys) == {"bytes", "path"}:  # `datasets` stores the name of an image's file beside its content
        keys = ["bytes"]
    if len(keys) != 1:
        raise DataError(f"{name} has {' and '.join(keys) or 'no image'}; give one of {', '.join(_SOURCES)}")
    (key,) = keys
    value = part[key]
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        if value.get("detail") in (None, "auto"):  # a key of OpenAI's form
            value = {inner: item for inner, item in value.items() if inner != "detail"}
        return _source({"type": "image", **value}, name)
    if not isinstance(value, str):
        raise DataError(f"{name}.{key} is of type {type(value).__name__}, but must be a string; fix it")
    return _content_of_text(value, key, name)


def _content_of_text(text: str, key: str, name: str) -> bytes | str:
    if key in ("bytes", "base64") or _DATA_URL.match(text):
        try:
            return base64.b64decode("".join(_DATA_URL.sub("", text, count=1).split()), validate=True)
        except (binascii.Error, ValueError) as fault:
            raise DataError(f"{name}.{key} is not base64 ({fault}); encode the image again") from None
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() == "file":
        return unquote(urlsplit(text).path)
    if scheme is not None or text.startswith("data:"):
        raise DataError(
            f"{name}.{key} is {text!r:.60}, but nothing is downloaded; give the path of a file or a data: URL in base64"
        )
    return text


def _file(path: Path, name: str) -> tuple[bytes, Mapping[str, int] | None]:
    """Reads an image file; returns its content and its state, None if later changes might leave the state as it is."""
    began_ns = time.time_ns()
    try:
        state = state_of(path)
        content = read_plain_file(path, _MOST_BYTES)
    except DataError as fault:
        raise DataError(f"{name}: {fault}") from None
    except (OSError, ValueError) as fault:
        raise DataError(f"{name}: {path} cannot be read: {getattr(fault, 'strerror', fault)}; replace it") from None
    if state_of(path) != state:
        raise DataError(f"{name}: {path} was changed while it was read; start again when nothing writes to it")
    return content, state if is_settled(state, began_ns) else None
