"""Reads a vision tower in config.json, and names its tensors."""

from collections.abc import Mapping
from typing import Any

from mtrain.arch.features.vision import tower_shapes
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.rope import ROPE_OBJECTS
from mtrain.hf.schema.table import Arrangement, FilledSlice, HfTensor, Table
from mtrain.hf.schema.tower import VISION, TrainedTower
from mtrain.hf.schema.values import needed_value, shown, wrong_type

KEY = "vision."
"""Prefix of the keys of a tower's tensors in a checkpoint."""
_SIZES = {
    "depth": ("num_layers", 27),
    "hidden_size": ("hidden_size", 1152),
    "intermediate_size": ("ffn_hidden_size", 4304),
    "num_heads": ("num_attention_heads", 16),
    "in_channels": ("num_channels", 3),
    "patch_size": ("patch_size", 16),
    "temporal_patch_size": ("frames_per_patch", 2),
    "spatial_merge_size": ("merge_size", 2),
    "num_position_embeddings": ("num_positions", 2304),
}
"""Field -> our field, and its default in transformers."""
_DEEPSTACK = "deepstack_visual_indexes"
_NEUTRAL = {_DEEPSTACK: [], "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}}
"""Field -> the only value that is supported, besides null."""
_OTHERS = ("model_type", "initializer_range", "out_hidden_size", "hidden_act")
"""Fields that are read elsewhere, or only initialise a new tower."""


def vision_of(config: Mapping[str, Any], text: Mapping[str, Any], family: TrainedTower) -> dict[str, Any]:
    """Returns the keys of `model.vision` for a config.json; `text` has the fields of its text model.

    Raises:
        DataError: The tower is not supported.
    """
    tower = config.get(VISION)
    if not isinstance(tower, dict):
        raise wrong_type(VISION, tower, "an object")
    if (name := tower.get("model_type", family.types[0])) not in family.types:
        raise DataError(
            f"config.json: {VISION}.model_type={shown(name)} is not supported, but {family.types[0]} is needed"
        )
    read = (*_SIZES, *_OTHERS, *([] if family.deepstack is None else [_DEEPSTACK]))
    for name, value in tower.items():
        is_known = name in read or name in INERT
        if not is_known and value not in (None, False, _NEUTRAL.get(name)):
            raise DataError(f"config.json: {VISION}.{name}={shown(value)} is not supported in a vision tower")
    if (width := needed_value(tower, "out_hidden_size", int, 3584)) != text.get("hidden_size"):
        raise DataError(
            f"config.json: {VISION}.out_hidden_size={width} must equal the hidden_size of the text model, "
            f"{shown(text.get('hidden_size'))}"
        )
    rope: Mapping[str, Any] = next((text[name] for name in ROPE_OBJECTS if isinstance(text.get(name), dict)), {})
    if rope.get("mrope_interleaved", True) is not True:
        raise DataError("config.json: mrope_interleaved must be true, because axes alternate in this family")
    return {
        "activation": needed_value(tower, "hidden_act", str, "gelu_pytorch_tanh"),
        **{ours: needed_value(tower, name, int, default) for name, (ours, default) in _SIZES.items()},
        "deepstack": () if family.deepstack is None else tower.get(_DEEPSTACK, family.deepstack),
        "rope_sections": rope.get("mrope_section", family.rope_sections),
        "image_token": needed_value(config, "image_token_id", int, family.image_token),
    }


def with_tower(table: Table, model: ModelSection, prefix: str) -> Table:
    """Adds the tensors of a model's tower, named `prefix` + name in transformers; without one, changes nothing."""
    if model.vision is None:
        return table
    shapes = tower_shapes(model.vision, model.hidden_size)
    slices = []
    for name, shape in shapes.items():
        axes = {f"a{axis}": size for axis, size in enumerate(shape)}
        arrangement = Arrangement(" ".join(axes), " ".join(axes), {}, axes)
        tensors = (HfTensor(prefix + name, arrangement),)
        slices.append(FilledSlice(KEY + name, TensorSlice.whole(shape), tensors, keeps_dtype=False))
    return Table(
        table.shapes | {KEY + name: shape for name, shape in shapes.items()}, (*table.slices, *slices), table.copies
    )
