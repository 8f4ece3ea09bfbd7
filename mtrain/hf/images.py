"""Image processors of transformers: from an image to the patches that a folder's vision tower reads."""

import base64
import hashlib
import io
import json
import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError, MachineError
from mtrain.config.schema.data import ImagesSection
from mtrain.config.schema.vision import ProcessedImage, VisionSection
from mtrain.config.towers import description_of
from mtrain.hf.schema.files import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_NAMES = ("processor_config.json", "preprocessor_config.json")
"""Files that describe an image processor; transformers prefers the first."""
_WIDE_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits per channel, all of them grey."""
_PROGRAMS = ("EPS", "WMF")
"""Formats that Pillow renders with another program."""
_BROWSER_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "ICO")
_MOST_SHOWN_BYTES = 2**20
"""Largest image that a page holds unchanged."""
_MOST_SHOWN_PIXELS = 1024
"""Longest side of a larger image in a page."""
_LONGEST_FAULT = 200


class Patches(NamedTuple):
    """Patches of one image."""

    pixels: NDArray[np.float32]
    """[patches, elements of a patch], as in `pixel_values`."""
    grid: NDArray[np.int64]
    """[3]: frames, rows and columns, as in `image_grid_thw`."""


class ImageProcessor:
    """Image processor that transformers' AutoProcessor takes from a folder; the first image loads it.

    transformers opens, rotates, converts and resizes the images, so the patches are the same as there.
    """

    def __init__(self, folder: Path, vision: VisionSection, limits: ImagesSection) -> None:
        self._arguments = (folder, vision, limits)
        self._folder, self._vision, self._merge_size = folder, vision, vision.merge_size
        self._tower = description_of(vision)
        self._limits = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        self.image_token = vision.image_token
        """Id of the token that stands for a feature of an image."""
        files = {name: read_json(folder / name) for name in PROCESSOR_NAMES if (folder / name).is_file()}
        # transformers resizes with torchvision if it is installed, otherwise with Pillow, which gives different pixels
        backend = "pillow" if find_spec("torchvision") is None else "torchvision"
        self.around = self._around()
        """Text that a template writes for an image -> the text around the image's token that replaces it; empty if the
        template writes all of it."""
        decisive = [files, self.image_token, self._merge_size, self._limits, backend]
        self._row_ends = self._ends_of_rows()
        decisive += [self.around] if self.around else []  # none in caches of earlier versions
        decisive += [self._row_ends, vision.patch_size] if self._row_ends else []
        self.fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
        """Identifies the settings that make patches from images."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments only; each process loads the processor itself."""
        return ImageProcessor, self._arguments

    def load(self) -> None:
        """Loads the processor; raises DataError or MachineError if that is impossible."""
        _ = self._processor

    def _around(self) -> dict[str, str]:
        if self._tower.around is None:
            return {}
        config, name = self._folder / TOKENIZER_CONFIG, "extra_special_tokens"
        content = read_json(config) if config.is_file() else {}
        extra: Any = content.get(name)
        named = {**(extra if isinstance(extra, dict) else {}), **content}
        tokens = {part: named.get(f"{part}_token") for part in ("boi", "image", "eoi")}
        said = {part: token.get("content") if isinstance(token, dict) else token for part, token in tokens.items()}
        texts = {part: text for part, text in said.items() if isinstance(text, str)}
        if len(texts) < len(tokens):
            raise DataError(
                f"{config} needs boi_token, image_token and eoi_token, which {self._tower.name} writes around an "
                "image; set data.tokenizer to the folder of the model"
            )
        written, replaced = self._tower.around
        return {texts[written]: replaced.format(**texts)}

    def _ends_of_rows(self) -> tuple[int, int] | None:
        """Returns the tokens after each row of features and after the last; None for a model without such tokens.

        Source: transformers 5.24, processing_pixtral.py, PixtralProcessor.
        """
        if not self._tower.has_row_ends:
            return None
        file, vocabulary = self._folder / "processor_config.json", self._folder / "tokenizer.json"
        settings = read_json(file) if file.is_file() else {}
        said = settings.get("patch_size", 16), settings.get("spatial_merge_size", 1)
        if said != (self._vision.patch_size, self._merge_size):
            raise DataError(
                f"{file} has patch_size={said[0]} and spatial_merge_size={said[1]}, but model.vision needs "
                f"{self._vision.patch_size} and {self._merge_size}; set data.tokenizer to the folder of the model"
            )
        added = read_json(vocabulary).get("added_tokens", []) if vocabulary.is_file() else []
        ids = {token["content"]: token["id"] for token in added}
        names = [settings.get(f"image_{part}_token", f"[IMG_{part.upper()}]") for part in ("break", "end")]
        if missing := [name for name in names if name not in ids]:
            raise DataError(
                f"{vocabulary} has no token {missing[0]}, which {self._tower.name} writes after rows of an image; set "
                "data.tokenizer to the folder of the model"
            )
        return ids[names[0]], ids[names[1]]

    def tokens(self, grid: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the token ids of an image, [tokens]: the image token for each feature, and the ends of rows."""
        if self._row_ends is None:
            return np.full(self.num_features(grid), self.image_token, np.int32)
        rows, columns = (int(size) // self._merge_size for size in grid[1:])
        tokens = np.full((rows, columns + 1), self.image_token, np.int32)
        tokens[:, -1], tokens[-1, -1] = self._row_ends
        return tokens.reshape(-1)

    def num_features(self, grid: Sequence[int] | NDArray[np.int64]) -> int:
        """Returns the number of features of an image; each replaces the embedding of one token."""
        return math.prod(map(int, grid)) // self._merge_size**2

    def axes(self, ids: NDArray[np.integer[Any]], grids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the rotary positions of one document, [n, 3]: time, height and width, from 0.

        A text token has the same position on all axes. The positions of an image start after those of the previous text
        and follow its rows and columns of features; the next text continues after the largest of them.

        Source: transformers 5.24, modeling_qwen3_5.py, get_rope_index.

        Args:
            ids: Token ids with all features of each image, [n].
            grids: Frames, rows and columns of the images in patches, [images, 3].
        """
        axes = np.empty((len(ids), 3), np.int64)
        image_tokens = np.flatnonzero(ids == self.image_token)
        if self._vision.rope_sections is None:
            _count(axes, 0)
            return axes
        token = position = feature = 0
        for grid in grids:
            frames, rows, columns = (int(grid[0]), *(int(size) // self._merge_size for size in grid[1:]))
            first = int(image_tokens[feature])
            position = _count(axes[token:first], position)
            feature += frames * rows * columns
            token = first + frames * rows * columns
            axes[first:token] = position + np.indices((frames, rows, columns)).reshape(3, -1).T
            position += max(rows, columns)
        _count(axes[token:], position)
        return axes

    def check(self, content: bytes) -> int:
        """Refuses an image that would silently lose content or fill the memory; returns its number of pixels."""
        Image = _pillow()  # noqa: N806 - a module
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(content)) as image:
                    mode, file_format = image.mode, image.format
                    num_pixels: int = image.width * image.height
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise DataError(f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down") from None
        except Exception as fault:  # whatever a damaged file makes a decoder raise
            raise _unreadable(fault) from fault
        if file_format in _PROGRAMS:
            raise DataError(f"is {file_format}, a program rather than pixels; save it as PNG")
        if mode.startswith(_WIDE_MODES):
            raise DataError(
                f"has more than 8 bits per channel (Pillow's mode {mode}), which transformers would clip to white; "
                "convert it to 8 bits"
            )
        return num_pixels

    def inputs(self, contents: Sequence[bytes], tensors: Literal["np", "pt"] = "pt") -> dict[str, Any]:
        """Returns what transformers' processor makes of image files: the arguments of its model, `pixel_values` among
        them, as numpy arrays or as tensors; errors do not name the image."""
        processor = self._processor
        urls = [f"data:image/any;base64,{base64.b64encode(content).decode()}" for content in contents]
        options: dict[str, Any] = {} if set(self._limits.values()) == {None} else {"size": self._sizes(processor)}
        if self._row_ends is not None:  # as PixtralProcessor does, so that rows and columns of features are whole
            options["patch_size"] = self._vision.patch_size * self._merge_size
        try:
            # as in a conversation for AutoProcessor: the processor opens, turns and converts images in its own way
            return dict(processor(processor.fetch_images(urls), return_tensors=tensors, **options))
        except Exception as fault:
            raise _unreadable(fault) from fault

    def patches(self, content: bytes) -> Patches:
        """Computes the patches of an image from the content of its file; errors do not name the image."""
        arrays = {name: np.asarray(values) for name, values in self.inputs([content], "np").items()}
        processor = self._processor
        source = f"{type(processor).__name__} of {self._folder}"
        pixels, grid = self._tower.patches(self._vision, ProcessedImage(arrays, processor, source, self._num_tokens))
        return Patches(np.ascontiguousarray(pixels, np.float32), np.array(grid, np.int64))

    @cached_property
    def _num_tokens(self) -> int:
        file = self._folder / "processor_config.json"
        return int((read_json(file) if file.is_file() else {}).get("image_seq_length", 256))

    @property
    def limits_areas(self) -> bool:
        """Whether the folder has a processor that resizes images to an area between two limits (`data.images`)."""
        if not any((self._folder / name).is_file() for name in PROCESSOR_NAMES):
            return False
        size = dict(self._processor.size or {})
        return all(size.get(name) is not None for name in self._limits)

    def _sizes(self, processor: Any) -> dict[str, int]:
        """Returns the smallest and the largest area of a resized image, under the names that transformers uses."""
        sizes = {}
        for name, limit in self._limits.items():
            default = dict(processor.size or {}).get(name)
            if default is None:
                raise DataError(
                    f"{type(processor).__name__} has no limits on pixels; remove data.images.min_pixels and max_pixels"
                )
            sizes[name] = default if limit is None else limit
        if sizes["shortest_edge"] > sizes["longest_edge"]:
            raise DataError(
                f"data.images.min_pixels={sizes['shortest_edge']} is above max_pixels={sizes['longest_edge']} (a "
                f"limit that is not set is that of {self._folder}); change one of them"
            )
        return sizes

    @cached_property
    def _processor(self) -> Any:
        _pillow()  # a missing package would fail later in transformers, with a less clear message
        if not any((self._folder / name).is_file() for name in PROCESSOR_NAMES):
            raise DataError(
                f"{self._folder} has no {' or '.join(reversed(PROCESSOR_NAMES))}, which describe how its model "
                "reads images; set data.tokenizer to the folder of a model that reads images"
            )
        try:
            from transformers import AutoImageProcessor
        except ImportError as fault:  # such as a torchvision for another torch
            raise MachineError(
                f"transformers cannot load image processors ({_short(fault)}); install it again"
            ) from fault
        try:
            # runs no code of the folder, and downloads nothing
            return AutoImageProcessor.from_pretrained(self._folder, trust_remote_code=False, local_files_only=True)
        except Exception as fault:
            raise DataError(
                f"{self._folder}: transformers cannot open its image processor ({_short(fault)}); download it again"
            ) from fault


def for_browser(content: bytes) -> bytes:
    """Returns an image for a page: unchanged, or as a reduced PNG or JPEG if it is large or of a format that browsers
    do not show."""
    Image = _pillow()  # noqa: N806 - a module
    from PIL import ImageOps

    with Image.open(io.BytesIO(content)) as image:
        if image.format in _BROWSER_FORMATS and len(content) <= _MOST_SHOWN_BYTES:
            return content
        shown = ImageOps.exif_transpose(image).convert("RGB")
    shown.thumbnail((_MOST_SHOWN_PIXELS, _MOST_SHOWN_PIXELS))
    file = io.BytesIO()
    shown.save(file, "JPEG" if len(content) > _MOST_SHOWN_BYTES else "PNG")
    return file.getvalue()


def _pillow() -> Any:
    """Returns Pillow's module `Image`; raises MachineError if Pillow or transformers is missing."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        missing = "Pillow"
    else:
        if find_spec("transformers") is not None:
            return Image
        missing = "transformers"
    raise MachineError(f"images need {missing}, which is not installed; run pip install mtrain[vision]")


def _count(axes: NDArray[np.int64], first: int) -> int:
    """Numbers text tokens on all axes; returns the number after the last."""
    axes[:] = np.arange(first, first + len(axes))[:, None]
    return first + len(axes)


def _unreadable(fault: Exception) -> DataError:
    return DataError(f"cannot be read ({_short(fault)}); replace it, or leave the record out")


def _short(fault: Exception) -> str:
    if type(fault).__name__ == "UnidentifiedImageError":  # its text is the address of an object
        return "it is in no format that Pillow knows"
    return " ".join(str(fault).split())[:_LONGEST_FAULT] or type(fault).__name__
