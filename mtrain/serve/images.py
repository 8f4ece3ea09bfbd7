"""Images of clients: checked as they arrive, and written out as tokens where the engine runs; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted

if TYPE_CHECKING:  # loads the data's modules, which the HTTP process does not need
    from mtrain.training.given_images import GivenImages

_BEGINNINGS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
_MOST_PIXELS, _MOST_PATCH_BYTES = 2**28, 2**31
"""Most pixels of the images of a call, as sent, and bytes of their patches: seconds for which all clients wait."""
MOST_IMAGES = 4096
"""Most images of a call."""


@dataclass(frozen=True)
class SentImage:
    """Image between the tokens of a client's text."""

    content: bytes
    """Content of a PNG or JPEG file."""
    expected_tokens: int | None
    """Tokens that it takes according to the client; None if the client does not say."""
    before: int
    """Number of tokens of text before it."""


def checked_image(content: bytes, kind: str, expected_tokens: int | None, before: int, name: str) -> SentImage:
    """Checks an image without decoding it."""
    if kind not in _BEGINNINGS:
        raise DataError(f"{name} has an image of the format {kind[:40]!r}; send png or jpeg")
    if not content.startswith(_BEGINNINGS[kind]):
        raise DataError(f"{name} has an image that does not begin as {kind} does; send the content of such a file")
    return SentImage(content, expected_tokens, before)


@dataclass(frozen=True)
class Interleaved:
    """Text with images in it."""

    tokens: NDArray[np.int32]
    """Tokens of the text alone."""
    images: Sequence[SentImage]

    @property
    def contents(self) -> list[bytes]:
        return [image.content for image in self.images]


def written_out(parts: Mapping[str, Interleaved], given: GivenImages) -> list[NDArray[np.int32]]:
    """Returns the tokens of each part with those of its images, in their places.

    Args:
        parts: Parts of a call, by their names in messages.

    Raises:
        DataError: The model reads text, an image cannot be read or takes another number of tokens than expected, or the
            images are too many or too large.
    """
    images = [image for part in parts.values() for image in part.images]
    if not images:
        return [part.tokens for part in parts.values()]
    processor = given.processor
    if len(images) > MOST_IMAGES or sum(processor.check(image.content) for image in images) > _MOST_PIXELS:
        raise DataError(
            f"the images of this call are more than {MOST_IMAGES}, or have more than {_MOST_PIXELS} pixels together; "
            "send fewer at once"
        )
    result, num_bytes = [], 0
    for name, part in parts.items():
        text = part.tokens[: max((image.before for image in part.images), default=0)]
        if (text == processor.image_token).any():
            raise DataError(f"{name} has the image token {processor.image_token} in a text before an image; remove it")
        written = list[NDArray[np.int32]]()
        for number, image in enumerate(part.images):
            try:
                patches = given.patches(image.content)
            except DataError as fault:
                raise DataError(f"{name}: image {number} {fault}") from None
            written.append(processor.tokens(patches.grid))
            taken = len(written[-1])
            num_bytes += patches.pixels.nbytes
            if image.expected_tokens not in (None, taken):
                raise DataError(
                    f"{name}: image {number} takes {counted(taken, 'token')}, but "
                    f"expected_tokens={image.expected_tokens}; send the right number, or leave it out"
                )
            if num_bytes > _MOST_PATCH_BYTES:
                raise DataError(
                    f"the images of this call have more than {_MOST_PATCH_BYTES} bytes of patches; send fewer at once"
                )
        places = np.repeat([image.before for image in part.images], [*map(len, written)]).astype(np.int64)
        result.append(np.insert(part.tokens, places, np.concatenate([part.tokens[:0], *written])))
    return result
