"""Features outside the decoder's layers: a vision tower before them, multi-token prediction (MTP) after them."""

from math import prod
from typing import Any, final

from mtrain.arch.features.feature import SMALL_HEAD_DIM, Feature, Parameters, SmallRun, norm_elements
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema.data import AnyData, SftSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import TrainSection
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import TOWERS, description_of

_MAX_SMALL_DEPTHS = 2
PROJECTOR = tuple(prefix for tower in TOWERS.values() for prefix in tower.projector)
"""Prefixes of the projector's tensors."""
KEY = "vision."
"""Prefix of the global names of a tower's tensors."""
_PATCHES_OF_IMAGE = 4096
"""Patches of an image whose size is not limited: a megapixel of patches of 16 x 16 pixels."""


@final
class Vision(Feature):
    """Images among the tokens; positions have three axes."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return None if model.vision is None else "model.vision"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        if model.vision is None:
            return {}
        is_fixed = description_of(model.vision).fixed_side(model.vision) is not None
        sizes: dict[str, Any] = {
            "num_layers": min(model.vision.num_layers, 2),
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 2,
            "patch_size": 2,
            "num_positions": min(model.vision.num_positions, 36 if is_fixed else 16),
            "merge_size": 2,
            "image_token": 0,
            # one, since the first stage may have one layer
            "deepstack": (0,) if model.vision.deepstack else (),
        }
        if model.vision.rope_sections is None:
            return {"vision": model.vision.model_dump() | sizes}
        # a whole head rotates, since fewer pairs would all turn with time
        height = width = SMALL_HEAD_DIM // 8
        sizes["rope_sections"] = (SMALL_HEAD_DIM // 2 - height - width, height, width)
        return {"vision": model.vision.model_dump() | sizes, "rope": model.rope.model_dump() | {"partial": 1.0}}


def num_tower_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower; 0 without one."""
    return 0 if vision is None else sum(map(prod, description_of(vision).shapes(vision, hidden_size).values()))


def is_trained(vision: VisionSection, name: str) -> bool:
    """Says whether a tensor of a tower is trained; `name` is without KEY."""
    return description_of(vision).is_trained(name, vision)


def trained_tower_sizes(vision: VisionSection | None, hidden_size: int) -> list[int]:
    """Returns the number of elements of each trained parameter of a tower; empty without one."""
    return [prod(shape) for _, shape in _trained(vision, hidden_size)]


def is_matrix(name: str, shape: Sizes) -> bool:
    """Says whether Muon updates a tensor of a tower: neither vectors, nor the convolution of patches, nor the table of
    positions, whose rows belong to one position each."""
    return len(shape) == 2 and not name.endswith(("pos_embed.weight", "position_embedding.weight"))


def matrix_rows(name: str, num_rows: int) -> list[int]:
    """Returns the rows of each matrix in a tensor of a tower; qwen3_vl joins queries, keys and values."""
    return [num_rows // 3] * 3 if name.endswith(".qkv.weight") else [num_rows]


def num_trained_in_matrices(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the elements of a tower's trained matrices; see `is_matrix`."""
    return sum(prod(shape) for name, shape in _trained(vision, hidden_size) if is_matrix(name, shape))


def _trained(vision: VisionSection | None, hidden_size: int) -> list[tuple[str, Sizes]]:
    if vision is None:
        return []
    shapes = description_of(vision).shapes(vision, hidden_size)
    return [(name, shape) for name, shape in shapes.items() if is_trained(vision, name)]


def recomputes_layers(vision: VisionSection, train: TrainSection) -> bool:
    """Says whether the backward pass of a tower computes its layers again: a frozen tower has no backward pass."""
    return train.recompute == "full" and not vision.freeze_tower


def num_frozen_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower that are not trained."""
    return num_tower_parameters(vision, hidden_size) - sum(trained_tower_sizes(vision, hidden_size))


def patches_of_tokens(vision: VisionSection | None, data: AnyData, tokens: int) -> tuple[int, int]:
    """Returns the patches of a row of `tokens` tokens, and of one of its images, if all tokens are of large images; 0
    for data that have no images.

    An image has as many patches as `data.images.max_pixels` allows; without a limit, _PATCHES_OF_IMAGE.
    """
    if vision is None or not isinstance(data, SftSection):
        return 0, 0
    limit = data.images.max_pixels
    patches = tokens * vision.patches_per_feature
    return patches, min(patches, _PATCHES_OF_IMAGE if limit is None else limit // vision.patch_size**2)


@final
class MultiTokenPrediction(Feature):
    """Depths that predict further tokens. Each joins two inputs with a projection, and has a layer like the model's
    last one and a norm."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        if model.mtp_depths == 0 or model.global_attention_every is None:
            return None
        return "model.mtp_depths with model.global_attention_every"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        return {"mtp_depths": min(model.mtp_depths, _MAX_SMALL_DEPTHS)}


def joint_parameters(model: ModelSection) -> Parameters:
    """Counts a depth's parameters outside its layer: norms of both inputs and the output, and the input projection."""
    return Parameters(divided=2 * model.hidden_size**2, replicated=3 * norm_elements(model, model.hidden_size))


def num_passed_features(model: ModelSection) -> int:
    """Counts the tensors, each as large as the hidden states, that stages of a pipeline pass on besides these: the
    features of images that depths read, since the first stage has the tower, and the last one the depths."""
    return 0 if model.vision is None else model.mtp_depths
