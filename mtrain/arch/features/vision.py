"""Vision towers: features of images that replace embeddings, and the tensors of a tower by name."""

from math import prod
from typing import Any, final

from mtrain.arch.features.feature import SMALL_HEAD_DIM, Feature, SmallRun
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VisionSection

PROJECTOR = ("merger.", "deepstack_merger_list.")
"""Prefixes of the projector's tensors."""


@final
class Vision(Feature):
    """Images among the tokens; positions have three axes."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return None if model.vision is None else "model.vision"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        if model.vision is None:
            return {}
        # a whole head rotates, since fewer pairs would all turn with time
        height = width = SMALL_HEAD_DIM // 8
        sizes = {
            "num_layers": min(model.vision.num_layers, 2),
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 2,
            "patch_size": 2,
            "num_positions": 16,
            "rope_sections": (SMALL_HEAD_DIM // 2 - height - width, height, width),
            "image_token": 0,
            # one, since the first stage may have one layer
            "deepstack": (0,) if model.vision.deepstack else (),
        }
        return {"vision": model.vision.model_dump() | sizes, "rope": model.rope.model_dump() | {"partial": 1.0}}


def tower_shapes(vision: VisionSection, hidden_size: int) -> dict[str, Sizes]:
    """Returns name -> shape of each parameter of a tower, for a language model of width `hidden_size`."""
    width, wide, merged = vision.hidden_size, vision.ffn_hidden_size, vision.patches_per_feature * vision.hidden_size
    patch = (vision.num_channels, vision.frames_per_patch, vision.patch_size, vision.patch_size)
    shapes: dict[str, Sizes] = {
        "pos_embed.weight": (vision.num_positions, width),
        "patch_embed.proj.weight": (width, *patch),
        "patch_embed.proj.bias": (width,),
    }
    for layer in range(vision.num_layers):
        block = f"blocks.{layer}."
        shapes |= _norm(f"{block}norm1", width) | _norm(f"{block}norm2", width)
        shapes |= _linear(f"{block}attn.qkv", 3 * width, width) | _linear(f"{block}attn.proj", width, width)
        shapes |= _linear(f"{block}mlp.linear_fc1", wide, width) | _linear(f"{block}mlp.linear_fc2", width, wide)
    shapes |= _merger("merger", width, merged, hidden_size)
    for number, _ in enumerate(vision.deepstack):
        shapes |= _merger(f"deepstack_merger_list.{number}", merged, merged, hidden_size)
    return shapes


def num_tower_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower; 0 without one."""
    return 0 if vision is None else sum(map(prod, tower_shapes(vision, hidden_size).values()))


def trained_tower_sizes(vision: VisionSection | None, hidden_size: int) -> list[int]:
    """Returns the number of elements of each trained parameter of a tower; empty without one."""
    if vision is None:
        return []
    return [
        prod(shape)
        for name, shape in tower_shapes(vision, hidden_size).items()
        if not (vision.freeze_projector if name.startswith(PROJECTOR) else vision.freeze_tower)
    ]


def num_frozen_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower that are not trained."""
    return num_tower_parameters(vision, hidden_size) - sum(trained_tower_sizes(vision, hidden_size))


def _merger(name: str, normed: int, merged: int, hidden_size: int) -> dict[str, Sizes]:
    inner = _norm(f"{name}.norm", normed) | _linear(f"{name}.linear_fc1", merged, merged)
    return inner | _linear(f"{name}.linear_fc2", hidden_size, merged)


def _norm(name: str, width: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
