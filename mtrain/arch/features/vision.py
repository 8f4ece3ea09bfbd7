"""Vision tower: features of images in the place of embeddings."""

from typing import final

from mtrain.arch.features.feature import Feature
from mtrain.config.schema.model import ModelSection


@final
class Vision(Feature):
    """Images among the tokens, whose positions have three axes."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return None if model.vision is None else "model.vision"
