"""Images: features that replace embeddings, and positions on three axes.

The tower is transformers' own module in the reference as in the run: what is judged is where its features go, how
positions count, and how gradients add up. Source of positions: Qwen2-VL (Wang et al. 2024), section 2.1; the axes of
pairs alternate as in Qwen3-VL.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VisionSection
from mtrain.config.towers import TOWERS, description_of
from mtrain.verify.reference.text import Picture, Rows

TOWER = "vision."
"""Prefix of the names of all tensors of a tower."""
PROJECTOR = tuple(f"{TOWER}{prefix}" for tower in TOWERS.values() for prefix in tower.projector)
"""Prefixes of the names of a projector's tensors."""
KEY_BIAS = ".self_attn.k_proj.bias"


def scaled_like(name: str) -> str:
    """Returns the parameter whose gradient tells how far that of parameter `name` may be off: itself, except for the
    bias of a tower's keys, which moves all scores of a query alike, so that its gradient is 0 but for rounding."""
    return name.removesuffix("bias") + "weight" if name.endswith(KEY_BIAS) else name


def tower_of(model: ModelSection) -> Any:
    """Returns the module of a model's tower; its own weights are not used."""
    assert model.vision is not None, "called for a model with a tower"
    return _tower(model.vision.model_dump_json(), model.hidden_size, model.norm_epsilon)


@lru_cache(maxsize=2)
def _tower(section: str, hidden_size: int, norm_epsilon: float) -> Any:
    vision = VisionSection.model_validate_json(section)
    config = description_of(vision).written(vision, hidden_size, norm_epsilon)
    match vision.kind:
        case "qwen3_vl":
            return _qwen3_vl(config)
        case "gemma3":
            return _gemma3(config)
        case "mistral3":
            return _mistral3(config)
        case "gemma4":
            return _gemma4(config)
        case _:
            assert_never(vision.kind)


def _gemma3(fields: Mapping[str, Any]) -> Any:
    from transformers import Gemma3Config, SiglipVisionModel
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    config = Gemma3Config(**fields)
    tower, projector = SiglipVisionModel(config.vision_config), Gemma3MultiModalProjector(config)
    return torch.nn.ModuleDict({"vision_tower": tower, "multi_modal_projector": projector})


def _mistral3(fields: Mapping[str, Any]) -> Any:
    from transformers import Mistral3Config, PixtralVisionModel
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

    config = Mistral3Config(**fields)
    tower, projector = PixtralVisionModel(config.vision_config), Mistral3MultiModalProjector(config)
    return torch.nn.ModuleDict({"vision_tower": tower, "multi_modal_projector": projector})


def _gemma4(fields: Mapping[str, Any]) -> Any:
    from transformers import Gemma4Config, Gemma4VisionModel
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

    config = Gemma4Config(**fields)
    tower = Gemma4VisionModel(config.vision_config)
    projector = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
    return torch.nn.ModuleDict({"vision_tower": tower, "embed_vision": projector})


def _qwen3_vl(fields: Mapping[str, Any]) -> Any:
    from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel

    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**fields["vision_config"]))


def places_of(picture: Picture, vision: VisionSection) -> NDArray[np.int64]:
    """Returns the positions of an image's features in its row, [features]."""
    height, width = picture.rows // vision.merge_size, picture.columns // vision.merge_size
    step = width + description_of(vision).has_row_ends
    places: NDArray[np.int64] = picture.start + np.add.outer(step * np.arange(height), np.arange(width)).ravel()
    return places


def with_features(
    embedded: Tensor, rows: Rows, model: ModelSection, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Replaces embeddings, [batch, seq, hidden], by the features of images, one image at a time; also returns what is
    added after each of the first layers (DeepStack: Meng et al. 2024, as in Qwen3-VL)."""
    if not rows.pictures or model.vision is None:
        return embedded, []
    tower = tower_of(model).to(embedded.device)
    weights = {name.removeprefix(TOWER): value for name, value in tensors.items() if name.startswith(TOWER)}
    result, deep = embedded.clone(), [torch.zeros_like(embedded) for _ in model.vision.deepstack]
    for row, pictures in enumerate(rows.pictures):
        for picture in pictures:
            found = _features(tower, weights, picture, model.vision)
            places = torch.from_numpy(places_of(picture, model.vision)).to(embedded.device)
            for target, features in zip([result, *deep], found, strict=True):
                target[row, places] = features
    return result, deep


def _features(tower: Any, weights: Mapping[str, Tensor], picture: Picture, vision: VisionSection) -> Sequence[Tensor]:
    """Returns the features of an image, [features, hidden], followed by those of deeper layers."""
    device = next(iter(weights.values())).device
    pixels = torch.from_numpy(picture.pixels).to(device)
    match vision.kind:
        case "qwen3_vl":
            grid = torch.tensor([[1, picture.rows, picture.columns]], device=device)
            output = torch.func.functional_call(tower, dict(weights), (pixels,), {"grid_thw": grid})
            return [output.pooler_output, *output.deepstack_features]
        case "mistral3":
            image = _joined(pixels, picture, vision)
            sizes = [tuple(image.shape[1:])]
            hidden = _called("vision_tower", tower, weights, image[None], sizes).last_hidden_state[0]
            return [_called("multi_modal_projector", tower, weights, hidden, sizes)]
        case "gemma3":
            image = _joined(pixels, picture, vision)
            hidden = _called("vision_tower", tower, weights, image[None]).last_hidden_state
            return [_called("multi_modal_projector", tower, weights, hidden)[0]]
        case "gemma4":
            places = torch.cartesian_prod(torch.arange(picture.rows), torch.arange(picture.columns)).flip(1).to(device)
            hidden = _called("vision_tower", tower, weights, pixels[None], places[None]).last_hidden_state
            return [_called("embed_vision", tower, weights, hidden)]
        case _:
            assert_never(vision.kind)


def _joined(patches: Tensor, picture: Picture, vision: VisionSection) -> Tensor:
    """Returns an image, [channels, height, width], from its patches, row by row."""
    size = vision.patch_size
    image = torch.empty(vision.num_channels, picture.rows * size, picture.columns * size, device=patches.device)
    for number, patch in enumerate(patches):
        row, column = divmod(number, picture.columns)
        place = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
        image[:, *place] = patch.view(vision.num_channels, size, size)
    return image


def _called(part: str, tower: Any, weights: Mapping[str, Tensor], values: Tensor, *more: Any) -> Any:
    prefix = f"{part}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    return torch.func.functional_call(tower[part], own, (values.to(next(iter(own.values())).dtype), *more))


def numbers_of_images(rows: Rows, vision: VisionSection) -> Tensor:
    """Returns the number of each token's image in its row, [batch, seq]; -1 for text."""
    numbers = torch.full_like(rows.positions, -1)
    for row, pictures in enumerate(rows.pictures):
        for number, picture in enumerate(pictures):
            numbers[row, torch.from_numpy(places_of(picture, vision)).to(numbers.device)] = number
    return numbers


def axes_of(rows: Rows, vision: VisionSection) -> Tensor:
    """Returns the positions of time, height and width in the document, [batch, seq, 3]."""
    axes = rows.positions.unsqueeze(-1).repeat(1, 1, 3)
    for row, pictures in enumerate(rows.pictures):
        for picture in pictures:
            end = int(places_of(picture, vision)[-1]) + 1
            first = int(axes[row, picture.start, 0])
            height, width = picture.rows // vision.merge_size, picture.columns // vision.merge_size
            for number in range(height * width):
                place = torch.tensor([first, first + number // width, first + number % width])
                axes[row, picture.start + number] = place
            # the text after an image continues after its longer side
            in_document = (rows.documents[row] == rows.documents[row, picture.start]) & (
                torch.arange(len(axes[row]), device=axes.device) >= end
            )
            axes[row, in_document] += max(height, width) - height * width
    return axes


def positions_of_pairs(axes: Tensor, num_pairs: int, vision: VisionSection) -> Tensor:
    """Returns the position by which each pair of a head rotates, [batch, seq, pairs]: time, height and width alternate;
    when the pairs of height and width are used up, all others take time."""
    assert vision.rope_sections is not None, "called for positions on three axes"
    taken = []
    for pair in range(num_pairs):
        axis = pair % 3
        taken.append(axes[..., axis if pair // 3 < vision.rope_sections[axis] else 0])
    return torch.stack(taken, dim=-1)
