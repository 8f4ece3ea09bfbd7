"""Images of a cache entry: references with digests for images in files, the content of all others.

Patches of an image take ten to a hundred times as much space as its file, so they are computed at each read.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.plain_files import read_plain_file
from mtrain.core.batch.sample import EncodedImage, TokenizedSample

IMAGE_BYTES = "image_bytes"
IMAGE_DTYPES: dict[str, type[np.generic]] = {
    "image_samples": np.int64,
    "image_grids": np.int64,
    "image_digests": np.uint8,
    "image_spots": np.int64,
    "image_files": np.uint8,
    IMAGE_BYTES: np.uint8,
}
"""Element type of each array, which only entries with images have. [images]: samples, the number of each image's
sample, ascending. [images, 3]: grids. [images, 32]: digests, SHA-256 of the content. [images, 2]: spots, begin and end
in `image_bytes`, or the line of a file in `image_files` and -1. `image_files` has a JSON object for each file."""
IMAGES_OF_TRAINING = ("image_samples", "image_grids", "image_digests")
_IN_FILE = -1
_MOST_BYTES = 1 << 28


class ChunkImage(NamedTuple):
    """An image as a worker returns it."""

    sample: int
    """Number of its sample in the chunk, counted from 0."""
    image: EncodedImage
    """The image, without the content of a file."""
    digest: bytes


def chunk_images(samples: Sequence[TokenizedSample]) -> tuple[ChunkImage, ...]:
    return tuple(
        ChunkImage(
            number, image if image.file is None else replace(image, content=b""), hashlib.sha256(image.content).digest()
        )
        for number, sample in enumerate(samples)
        for image in sample.images
    )


class ImageWriter:
    """Writes the images of a new entry; `write` appends to an array. Stores equal images once."""

    def __init__(self, write: Callable[[str, NDArray[Any]], None]) -> None:
        self._write, self._size = write, 0
        self._spots: dict[bytes, tuple[int, int]] = {}
        self._files: dict[tuple[int, str], tuple[int, bytes]] = {}

    def add(self, images: Sequence[ChunkImage], file: int, first_sample: int) -> None:
        """Appends the images of a chunk of the data file with the number `file`."""
        if not images:
            return
        spots = [self._spot_in_file(each, file) if each.image.file is not None else self._spot(each) for each in images]
        self._write("image_samples", np.array([first_sample + each.sample for each in images]))
        self._write("image_grids", np.array([each.image.grid for each in images]))
        self._write("image_digests", np.frombuffer(b"".join(each.digest for each in images), np.uint8))
        self._write("image_spots", np.array(spots))

    def _spot(self, each: ChunkImage) -> tuple[int, int]:
        if each.digest not in self._spots:
            self._write(IMAGE_BYTES, np.frombuffer(each.image.content, np.uint8))
            self._spots[each.digest] = (self._size, self._size + len(each.image.content))
            self._size += len(each.image.content)
        return self._spots[each.digest]

    def _spot_in_file(self, each: ChunkImage, file: int) -> tuple[int, int]:
        name, state = each.image.file, each.image.state
        assert name is not None, "an image in a file"
        if (file, name) not in self._files:
            text = json.dumps({"file": file, "name": name, "state": state, "sha256": each.digest.hex()}) + "\n"
            self._write("image_files", np.frombuffer(text.encode(), np.uint8))
            self._files[file, name] = len(self._files), each.digest
        line, digest = self._files[file, name]
        if digest != each.digest:
            raise DataError(f"the image {name} was changed while it was read; start again when nothing writes to it")
        return line, _IN_FILE


class ImageFile(NamedTuple):
    path: Path
    state: Mapping[str, int] | None
    """State on disk when it was read; None if it cannot be trusted."""
    sha256: str


class ImageStore:
    """Images of an entry; thread-safe."""

    def __init__(self, folder: Path, arrays: Mapping[str, NDArray[Any]], folders: Sequence[Path]) -> None:
        """`folder` is the entry's folder; paths of images are relative to `folders`, those of the data files."""
        self._folder = folder
        nothing = np.empty(0, np.uint8)
        self._samples, self._spots = arrays["image_samples"], arrays["image_spots"].reshape(-1, 2)
        self._bytes = arrays.get(IMAGE_BYTES, nothing)
        self.grids: NDArray[np.int64] = arrays["image_grids"].reshape(-1, 3)
        """[images, 3]: frames, rows and columns of each image, in patches."""
        self._digests = arrays["image_digests"].reshape(-1, hashlib.sha256().digest_size)
        lines = map(json.loads, arrays.get("image_files", nothing).tobytes().splitlines())
        self.files = [ImageFile(folders[line["file"]] / line["name"], line["state"], line["sha256"]) for line in lines]

    def of_sample(self, index: int) -> slice:
        """Returns the range of a sample's images in `grids`."""
        first, end = np.searchsorted(self._samples, [index, index + 1])
        return slice(int(first), int(end))

    def read(self, index: int) -> Iterator[EncodedImage]:
        """Reads the images of a sample; raises DataError if the content of one has changed."""
        images = self.of_sample(index)
        for number in range(images.start, images.stop):
            frames, rows, columns = self.grids[number].tolist()
            yield EncodedImage(self._content(number), (frames, rows, columns))

    def _content(self, number: int) -> bytes:
        begin, end = self._spots[number].tolist()
        if end == _IN_FILE:
            path = self.files[begin].path
            try:
                content = read_plain_file(path, _MOST_BYTES)
            except OSError as error:
                raise DataError(f"the image {path} cannot be read: {error.strerror or error}; restore it") from error
            fault = f"the image {path} was changed after the data were tokenised; start again to tokenise them anew"
        else:
            content = self._bytes[begin:end].tobytes()
            fault = f"{self._folder}: an image has changed on disk; remove this folder, and check the disk"
        if hashlib.sha256(content).digest() != self._digests[number].tobytes():
            raise DataError(fault)
        return content
