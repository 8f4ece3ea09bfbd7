"""Images: features that replace embeddings, and positions on three axes.

The tower is transformers' own module in the reference as in the run: what is judged is where its features go, how
positions count, and how gradients add up. Source of positions: Qwen2-VL (Wang et al. 2024), section 2.1; the axes of
pairs alternate as in Qwen3-VL.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VisionSection
from mtrain.verify.reference.text import Picture, Rows

TOWER, PROJECTOR = "vision.", ("vision.merger.", "vision.deepstack_merger_list.")
"""Prefixes of the names of all tensors of a tower, and of its projector's."""


def tower_of(model: ModelSection) -> Any:
    """Returns the module of a model's tower; its own weights are not used."""
    assert model.vision is not None, "called for a model with a tower"
    return _tower(model.vision.model_dump_json(), model.hidden_size)


@lru_cache(maxsize=2)
def _tower(section: str, hidden_size: int) -> Any:
    from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel

    vision = VisionSection.model_validate_json(section)
    return Qwen3VLVisionModel(
        Qwen3VLVisionConfig(
            depth=vision.num_layers,
            hidden_size=vision.hidden_size,
            hidden_act=vision.activation,
            intermediate_size=vision.ffn_hidden_size,
            num_heads=vision.num_attention_heads,
            in_channels=vision.num_channels,
            patch_size=vision.patch_size,
            spatial_merge_size=vision.merge_size,
            temporal_patch_size=vision.frames_per_patch,
            out_hidden_size=hidden_size,
            num_position_embeddings=vision.num_positions,
            deepstack_visual_indexes=list(vision.deepstack),
        )
    )


def num_features(picture: Picture, vision: VisionSection) -> int:
    """Counts the tokens that an image takes."""
    return picture.rows * picture.columns // vision.merge_size**2


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
            grid = torch.tensor([[1, picture.rows, picture.columns]], device=embedded.device)
            pixels = torch.from_numpy(picture.pixels).to(embedded.device)
            output = torch.func.functional_call(tower, weights, (pixels,), {"grid_thw": grid})
            end = picture.start + num_features(picture, model.vision)
            for target, features in zip(
                [result, *deep], [output.pooler_output, *output.deepstack_features], strict=True
            ):
                target[row, picture.start : end] = features
    return result, deep


def axes_of(rows: Rows, vision: VisionSection) -> Tensor:
    """Returns the positions of time, height and width in the document, [batch, seq, 3]."""
    axes = rows.positions.unsqueeze(-1).repeat(1, 1, 3)
    for row, pictures in enumerate(rows.pictures):
        for picture in pictures:
            end = picture.start + num_features(picture, vision)
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
    taken = []
    for pair in range(num_pairs):
        axis = pair % 3
        taken.append(axes[..., axis if pair // 3 < vision.rope_sections[axis] else 0])
    return torch.stack(taken, dim=-1)
