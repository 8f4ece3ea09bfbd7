"""Images that a program passes with its samples and prompts."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.config.schema.data import DataSection, ImagesSection, SftSection
from mtrain.config.schema.model import ModelSection
from mtrain.core.batch.images import SampleImages
from mtrain.core.batch.numbers import token_ids
from mtrain.core.batch.sample import HERE, Sample
from mtrain.data.encoding.compared import image_processor
from mtrain.data.encoding.images import content_of
from mtrain.data.samples.images import placed
from mtrain.hf.images import ImageProcessor, Patches
from mtrain.hf.tokenizer.tokenizer import tokenizer_file

_MOST_BYTES = 2**28
"""Largest size of the patches that are kept for further passes and for other samples with the same image."""


class GivenImages:
    """Turns images into patches, and places them among the tokens of a sample or prompt."""

    def __init__(self, model: ModelSection, data: DataSection) -> None:
        self._model, self._data = model, data
        self._kept: OrderedDict[bytes, Patches] = OrderedDict()

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor of data.tokenizer's folder or, without that key, of model.hf."""
        data, model = self._data, self._model
        if model.vision is None:
            raise DataError("the model reads text, but there is an image; set model.vision, or leave the image out")
        if isinstance(data, SftSection):
            processor = image_processor(data, model)
            assert processor is not None, "the model has a tower"
            return processor
        if data.tokenizer is None and model.hf is None:
            raise DataError("images need the image processor of the model's folder; set model.hf, or data.tokenizer")
        folder = Path(str(model.hf)) if data.tokenizer is None else tokenizer_file(data.tokenizer).parent
        return ImageProcessor(folder, model.vision, ImagesSection())

    def load(self) -> None:
        """Loads the image processor, which otherwise the first image does."""
        self.processor.load()

    def patches(self, content: bytes) -> Patches:
        """Returns the patches of an image file."""
        key = hashlib.sha256(content).digest()
        if key not in self._kept:
            self.processor.check(content)
            self._kept[key] = self.processor.patches(content)
        self._kept.move_to_end(key)
        found = self._kept[key]
        while len(self._kept) > 1 and sum(each.pixels.nbytes for each in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)
        return found

    def with_images(self, sample: Sample, images: Sequence[Any], name: str) -> Sample:
        """Adds the images of a datum to its sample.

        Args:
            images: Values of `Datum.images`.
            name: Name of the datum in messages.

        Raises:
            DataError: An image cannot be read, or the tokens do not contain each image once.
        """
        ids = np.concatenate([sample.tokens, sample.labels[-1:]])
        # an image token in the loss was drawn by the model, which reads it as text
        is_drawn = np.concatenate([[False], sample.mask > 0])
        found = self._placed(ids, images, is_drawn, name)
        if found is None:
            return sample
        return replace(sample, images=replace(found, places=found.places[:-1], axes=found.axes[:-1]))

    def of_prompts(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[Any]] | None
    ) -> list[SampleImages | None]:
        """Places the images of each prompt; raises DataError as `with_images` does."""
        if images is None:
            return []
        if len(images) != len(prompts):
            raise _refused(
                f"there are images for {counted(len(images), 'prompt')}, but {counted(len(prompts), 'prompt')}; give a "
                "list for each"
            )
        found = []
        for number, (prompt, own) in enumerate(zip(prompts, images)):
            name = f"prompt {number}"
            ids = token_ids(prompt, name, self._model.vocab_size)
            found.append(self._placed(ids, own, np.zeros(len(ids), np.bool_), name))
        return found

    def _placed(
        self, ids: NDArray[np.int64], images: Sequence[Any], is_drawn: NDArray[np.bool_], name: str
    ) -> SampleImages | None:
        vision = self._model.vision
        if not isinstance(images, Sequence) or isinstance(images, str | bytes):
            raise _refused(f"{name} has images of type {type(images).__name__}; give a list, with one for each image")
        if vision is None:
            if images:
                raise _refused(
                    f"{name} has images, but the model reads text; set model.vision, or leave the images out"
                )
            return None
        try:
            processor = self.processor if images else None
            patches = [self._read(image, f"{name}: image {number}") for number, image in enumerate(images)]
        except DataError as fault:
            raise _refused(str(fault)) from fault
        counts = [] if processor is None else [processor.num_features(patch.grid) for patch in patches]
        at, total = np.flatnonzero(ids == vision.image_token), sum(counts)
        given = at[~is_drawn[at]]
        # with weights on all tokens, those after the images are the drawn ones
        features = given if len(given) == total else at[:total]
        rest = np.setdiff1d(at, features)
        if len(features) < total or not is_drawn[rest].all():
            raise _refused(
                f"{name} has the image token {vision.image_token} {len(at)} times, but its {len(patches)} image(s) "
                f"take {counted(total, 'token')}; repeat the token once for each feature, as the processor of "
                "transformers does"
            )
        if processor is None:
            return None
        runs = np.split(features, np.cumsum(counts)[:-1])
        for number, (run, patch) in enumerate(zip(runs, patches, strict=True)):
            tokens = processor.tokens(patch.grid)
            if not np.array_equal(ids[run[0] : run[0] + len(tokens)], tokens):
                raise _refused(
                    f"{name} does not have the {counted(len(tokens), 'token')} of image {number} side by side; write "
                    "them as the processor of transformers does"
                )
        text = ids.copy()
        text[rest] = -1
        return placed(text, patches, processor)

    def _read(self, image: Any, name: str) -> Patches:
        part = image
        if isinstance(image, bytes | bytearray):
            part = {"bytes": bytes(image)}
        elif isinstance(image, str | Path):
            part = {"path": str(image)}
        elif not isinstance(image, Mapping):
            raise DataError(
                f"{name} is of type {type(image).__name__}; give the bytes of an image file, its path, or a part of a "
                "message"
            )
        content, file, _ = content_of({"type": "image", **part}, name, HERE)
        try:
            return self.patches(content)
        except DataError as fault:
            raise DataError(f"{name}{'' if file is None else f': {file}'} {fault}") from None


def _refused(message: str) -> DataError:
    """Makes an error that every rank raises, since all ranks have the same samples and prompts."""
    error = DataError(message)
    error.on_every_rank = True
    return error
