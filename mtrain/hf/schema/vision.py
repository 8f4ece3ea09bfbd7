"""Reads a vision tower in config.json, and names its tensors."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, assert_never

from mtrain.arch.features.vision import KEY, tower_shapes
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.rope import ROPE_OBJECTS
from mtrain.hf.schema.table import Arrangement, FilledSlice, HfTensor, Table
from mtrain.hf.schema.tower import VISION, TrainedTower
from mtrain.hf.schema.values import needed_value, shown, wrong_type


@dataclass(frozen=True)
class _Fields:
    """Fields of a tower's config.json."""

    sizes: Mapping[str, tuple[str, int]]
    """Field -> our field, and its default in transformers."""
    neutral: Mapping[str, object]
    """Field -> the only value that is supported, besides null."""
    others: tuple[str, ...]
    """Fields that are read elsewhere, or only initialise a new tower."""

    def read(self, tower: Mapping[str, Any], read: Collection[str] = ()) -> dict[str, Any]:
        """Returns our sizes; refuses fields that are neither known nor in `read`."""
        known = {*self.sizes, *self.others, *read, *INERT}
        for name, value in tower.items():
            # a missing field is not refused, hence no comparison with a default here
            if name not in known and value not in (None, False, self.neutral.get(name)):
                raise DataError(f"config.json: {VISION}.{name}={shown(value)} is not supported in a vision tower")
        return {ours: needed_value(tower, name, int, default) for name, (ours, default) in self.sizes.items()}


_DEEPSTACK = "deepstack_visual_indexes"
_QWEN3_VL = _Fields(
    {
        "depth": ("num_layers", 27),
        "hidden_size": ("hidden_size", 1152),
        "intermediate_size": ("ffn_hidden_size", 4304),
        "num_heads": ("num_attention_heads", 16),
        "in_channels": ("num_channels", 3),
        "patch_size": ("patch_size", 16),
        "temporal_patch_size": ("frames_per_patch", 2),
        "spatial_merge_size": ("merge_size", 2),
        "num_position_embeddings": ("num_positions", 2304),
    },
    {_DEEPSTACK: [], "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
    ("model_type", "initializer_range", "out_hidden_size", "hidden_act"),
)
_SIGLIP = _Fields(
    {
        "num_hidden_layers": ("num_layers", 12),
        "hidden_size": ("hidden_size", 768),
        "intermediate_size": ("ffn_hidden_size", 3072),
        "num_attention_heads": ("num_attention_heads", 12),
        "num_channels": ("num_channels", 3),
        "patch_size": ("patch_size", 16),
    },
    {"layer_norm_eps": 1e-6},
    ("model_type", "hidden_act", "image_size", "vision_use_head"),
)

_BASE = {"rope_theta": 10000.0}
_PIXTRAL = _Fields(
    {
        "num_hidden_layers": ("num_layers", 24),
        "hidden_size": ("hidden_size", 1024),
        "intermediate_size": ("ffn_hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 16),
        "num_channels": ("num_channels", 3),
        "patch_size": ("patch_size", 16),
    },
    {"attention_dropout": 0.0, **_BASE},
    # transformers computes head_dim from the sizes, and rotates images of any size
    ("model_type", "hidden_act", "image_size", "head_dim", "initializer_range", "rope_parameters"),
)
_OF_PROJECTOR = {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "multimodal_projector_bias": False}
"""Field of Mistral 3 -> the only value that is supported, which is the default."""


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
    match family.kind:
        case "qwen3_vl":
            fields = _of_qwen3_vl(config, tower, text, family)
        case "gemma3":
            fields = _of_gemma3(config, tower, family)
        case "mistral3":
            fields = _of_mistral3(config, tower, family)
        case _:
            assert_never(family.kind)
    return {"kind": family.kind, "activation": needed_value(tower, "hidden_act", str, "gelu_pytorch_tanh"), **fields}


def _of_qwen3_vl(
    config: Mapping[str, Any], tower: Mapping[str, Any], text: Mapping[str, Any], family: TrainedTower
) -> dict[str, Any]:
    sizes = _QWEN3_VL.read(tower, () if family.deepstack is None else (_DEEPSTACK,))
    if (width := needed_value(tower, "out_hidden_size", int, 3584)) != text.get("hidden_size"):
        raise DataError(
            f"config.json: {VISION}.out_hidden_size={width} must equal the hidden_size of the text model, "
            f"{shown(text.get('hidden_size'))}"
        )
    rope: Mapping[str, Any] = next((text[name] for name in ROPE_OBJECTS if isinstance(text.get(name), dict)), {})
    if rope.get("mrope_interleaved", True) is not True:
        raise DataError("config.json: mrope_interleaved must be true, because axes alternate in this family")
    return sizes | {
        "deepstack": () if family.deepstack is None else tower.get(_DEEPSTACK, family.deepstack),
        "rope_sections": rope.get("mrope_section", family.rope_sections),
        "image_token": needed_value(config, "image_token_id", int, family.image_token),
    }


def _of_gemma3(config: Mapping[str, Any], tower: Mapping[str, Any], family: TrainedTower) -> dict[str, Any]:
    sizes = _SIGLIP.read(tower)
    if needed_value(tower, "vision_use_head", bool, True):
        raise DataError(
            f"config.json: {VISION}.vision_use_head=True (a head that the features do not use) is not supported, but "
            "False is needed"
        )
    side, remainder = divmod(needed_value(tower, "image_size", int, 224), max(1, sizes["patch_size"]))
    tokens = needed_value(config, "mm_tokens_per_image", int, 256)
    if remainder or tokens < 1 or isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
        raise DataError(
            f"config.json: {VISION}.image_size={shown(tower.get('image_size'))} with patch_size="
            f"{sizes['patch_size']} does not divide into mm_tokens_per_image={tokens} equal squares of whole patches; "
            "correct the file"
        )
    # transformers 5.24 reads either name
    name = "image_token_id" if "image_token_id" in config else "image_token_index"
    return sizes | {
        "num_positions": side**2,
        "merge_size": side // isqrt(tokens),
        "frames_per_patch": 1,
        "image_token": needed_value(config, name, int, family.image_token),
    }


def _of_mistral3(config: Mapping[str, Any], tower: Mapping[str, Any], family: TrainedTower) -> dict[str, Any]:
    sizes = _PIXTRAL.read(tower)
    # transformers reads the type "default" as "axial"
    if tower.get("rope_parameters") not in (None, *({"rope_type": kind} | _BASE for kind in ("axial", "default"))):
        raise DataError(
            f"config.json: {VISION}.rope_parameters={shown(tower['rope_parameters'])} is not supported in a vision "
            f"tower, but {shown({'rope_type': 'axial'} | _BASE)} is needed"
        )
    for field, needed in _OF_PROJECTOR.items():
        if (value := config.get(field, needed)) != needed or isinstance(value, bool) != isinstance(needed, bool):
            raise DataError(f"config.json: {field}={shown(value)} is not supported, but {needed} is needed")
    # transformers 5.24 reads either name
    name = "image_token_id" if "image_token_id" in config else "image_token_index"
    return sizes | {
        "activation": needed_value(tower, "hidden_act", str, "gelu"),
        "num_positions": 1,
        "merge_size": needed_value(config, "spatial_merge_size", int, 2),
        "frames_per_patch": 1,
        "image_token": needed_value(config, name, int, family.image_token),
    }


def with_tower(table: Table, model: ModelSection, prefixes: Iterable[tuple[str, str]]) -> Table:
    """Adds the tensors of a model's tower, named as in transformers after the given prefixes, ours and theirs; without
    a tower, changes nothing."""
    if model.vision is None:
        return table
    shapes = tower_shapes(model.vision, model.hidden_size)
    slices = []
    for name, shape in shapes.items():
        axes = {f"a{axis}": size for axis, size in enumerate(shape)}
        arrangement = Arrangement(" ".join(axes), " ".join(axes), {}, axes)
        theirs = next(theirs + name.removeprefix(ours) for ours, theirs in prefixes if name.startswith(ours))
        tensors = (HfTensor(theirs, arrangement),)
        slices.append(FilledSlice(KEY + name, TensorSlice.whole(shape), tensors, keeps_dtype=False))
    return Table(
        table.shapes | {KEY + name: shape for name, shape in shapes.items()}, (*table.slices, *slices), table.copies
    )
