"""Images of samples: cuts between images, and the patches, features and positions of a piece."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.sample import EncodedImage, Sample, TokenizedSample
from mtrain.data.cache.entry import TokenCache
from mtrain.hf.images import ImageProcessor, Patches


def spans(cache: TokenCache, index: int, processor: ImageProcessor) -> NDArray[np.int64]:
    """Returns the token range (first, end) of each image of a sample, [images, 2]."""
    if cache.images is None:
        return np.empty((0, 2), np.int64)
    tokens = np.flatnonzero(cache.ids(index) == processor.image_token)
    grids = cache.images.grids[cache.images.of_sample(index)]
    if not len(grids):
        return np.empty((0, 2), np.int64)
    counts = [processor.num_features(grid) for grid in grids]
    starts = tokens[np.cumsum([0, *counts[:-1]], dtype=np.int64)]
    return np.stack([starts, starts + [len(processor.tokens(grid)) for grid in grids]], axis=1)


def outside(spans: NDArray[np.int64], cut: int, to: Literal["earlier", "later"]) -> int:
    """Moves a cut, which is before the token `cut`, to the beginning or the end of the image around it."""
    inside = spans[(spans[:, 0] < cut) & (cut < spans[:, 1])]
    return int(inside[0, 0 if to == "earlier" else 1]) if len(inside) else cut


def split(spans: NDArray[np.int64], length: int, seq_length: int) -> list[tuple[int, int]]:
    """Cuts a sample into pieces (start, size) of at most seq_length + 1 tokens, which overlap by one token.

    Raises:
        DataError: An image is longer than a piece.
    """
    pieces, start = [], 0
    while length - start > seq_length + 1:
        end = outside(spans, start + seq_length, "earlier")
        if end <= start:
            raise DataError(
                f"has an image of {counted(int(np.diff(spans[spans[:, 0] == start])[0, 0]), 'token')}, which is not "
                f"split, but data.seq_length={seq_length}; raise it, lower data.images.max_pixels, or set "
                "data.too_long=drop"
            )
        pieces.append((start, end - start + 1))
        start = end
    return [*pieces, (start, length - start)]


def encoded_images(
    record: TokenizedSample, start: int, end: int, processor: ImageProcessor
) -> tuple[EncodedImage, ...]:
    """Returns the images among the tokens [start, end) of a record; the last token is only predicted."""
    is_image = record.ids == processor.image_token
    counts = [int(is_image[:cut].sum()) for cut in (start, max(start, end - 1))]
    features = np.cumsum([processor.num_features(image.grid) for image in record.images])
    first, stop = np.searchsorted(features, counts, side="right")
    return record.images[first:stop]


def images_of(record: TokenizedSample, start: int, end: int, processor: ImageProcessor) -> SampleImages | None:
    """Processes the images of `encoded_images`; None for text alone."""
    images = encoded_images(record, start, end, processor)
    if not images:
        return None
    patches = [processor.patches(image.content) for image in images]
    if [image.grid for image in images] != [tuple(patch.grid.tolist()) for patch in patches]:
        raise DataError(
            "is resized to different rows and columns than when the data were tokenised; use the same version of "
            "transformers, or remove the token cache (data.cache_dir)"
        )
    return placed(record.ids[start : end - 1], patches, processor)


def placed(ids: NDArray[np.integer[Any]], patches: Sequence[Patches], processor: ImageProcessor) -> SampleImages:
    """Places images among token ids, [n], whose image tokens are those of the images."""
    grids = np.array([patch.grid for patch in patches], np.int64)
    is_image = ids == processor.image_token
    places = np.where(is_image, np.cumsum(is_image) - 1, -1)
    pixels = [each.pixels for each in patches]
    # no copy of a single image, which many rollouts may share
    whole = pixels[0] if len(pixels) == 1 else np.concatenate(pixels)
    return SampleImages(whole, grids, places, processor.axes(ids, grids))


def with_images(
    sample: Sample, record: TokenizedSample, start: int, end: int, processor: ImageProcessor | None, location: str
) -> Sample:
    """Adds the images among the tokens [start, end) of a record to the sample of these tokens.

    Raises:
        DataError: An image cannot be read; the message begins with `location`.
    """
    if processor is None or not record.images:
        return sample
    try:
        return replace(sample, images=images_of(record, start, end, processor))
    except DataError as fault:
        raise DataError(f"{location}: an image {fault}") from None
