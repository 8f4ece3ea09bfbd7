"""Reads a vision tower in config.json, and names its tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from mtrain.arch.features.outside import KEY
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import TensorSlice
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.vision import VISION, ConfigJson, TrainedTower
from mtrain.config.towers import TOWERS, description_of
from mtrain.hf.schema.inert import INERT
from mtrain.hf.schema.rope import ROPE_OBJECTS
from mtrain.hf.schema.table import Arrangement, FilledSlice, HfTensor, Table
from mtrain.hf.schema.values import needed_value, shown, wrong_type


def vision_of(config: Mapping[str, Any], text: Mapping[str, Any], family: TrainedTower) -> dict[str, Any]:
    """Returns the keys of `model.vision` for a config.json; `text` has the fields of its text model.

    Raises:
        DataError: The tower is not supported.
    """
    tower, description = config.get(VISION), TOWERS[family.kind]
    if not isinstance(tower, dict):
        raise wrong_type(VISION, tower, "an object")
    if (name := tower.get("model_type", family.types[0])) not in family.types:
        raise DataError(
            f"config.json: {VISION}.model_type={shown(name)} is not supported, but {family.types[0]} is needed"
        )
    fields = description.fields
    known = {*fields.sizes, *fields.others, fields.activation[0], *INERT}
    for name, value in tower.items():
        # a missing field is not refused, hence no comparison with a default here
        if name not in known and value not in (None, False, fields.neutral.get(name)):
            raise DataError(f"config.json: {VISION}.{name}={shown(value)} is not supported in a vision tower")
    sizes = {ours: needed_value(tower, name, int, default) for name, (ours, default) in fields.sizes.items()}
    rope: Mapping[str, Any] = next((text[name] for name in ROPE_OBJECTS if isinstance(text.get(name), dict)), {})
    more = description.read(ConfigJson(config, tower, text, rope, needed_value, shown), sizes, family)
    activation = needed_value(tower, fields.activation[0], str, fields.activation[1])
    return {"kind": family.kind, "activation": activation, **sizes, **more}


def with_tower(table: Table, model: ModelSection, prefixes: Iterable[tuple[str, str]]) -> Table:
    """Adds the tensors of a model's tower, named as in transformers after the given prefixes, ours and theirs; without
    a tower, changes nothing."""
    if model.vision is None:
        return table
    shapes = description_of(model.vision).shapes(model.vision, model.hidden_size)
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
