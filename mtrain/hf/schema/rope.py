"""Reads and writes rotary embeddings in config.json, as in transformers 5 (`rope_parameters`) and earlier versions."""

from collections.abc import Collection, Mapping
from typing import Any

from mtrain.base.errors import DataError
from mtrain.config.schema.rope import RopeSection
from mtrain.hf.schema.values import needed_value, shown, shown_name, value_of, wrong_type

_ORIGINAL = "original_max_position_embeddings"
_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_YARN = ("beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim")
_NAMES = {
    "none": (),
    "proportional": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, *_YARN),
}
_FIELDS = {
    scaling: {name: "original_max_positions" if name == _ORIGINAL else name for name in names}
    for scaling, names in _NAMES.items()
}
"""Our scaling -> field in the file -> our field. A missing field or null has the same default on both sides."""
_KINDS: dict[str, type[int] | type[bool]] = {_ORIGINAL: int, "truncate": bool}
"""Field -> its type, if not float."""


PARTIAL = "partial_rotary_factor"
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
"""Fields with the rotary parameters, in transformers 5 and in older versions."""
ROPE_NAMES = (*ROPE_OBJECTS, "rope_theta", PARTIAL, _ORIGINAL)
"""Fields of config.json that define the rotary embedding; the original length defaults to max_position_embeddings."""
_NEEDED = {"none": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
"""Our scaling -> fields that have no default in transformers."""


def rope_parameters(config: dict[str, Any], default_base: float, by_kind: bool = False) -> dict[str, Any]:
    """Returns the rotary fields of a config.json in transformers 5's form; see `read_rope` for the arguments.

    transformers 4 reads `rope_scaling` and `rope_theta`; transformers 5 prefers them to `rope_parameters`. Refuses a
    file whose two forms contradict each other, or that the two versions read differently.
    """
    parameters, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    # transformers 5's form, whatever the file's style
    merged = _normal(parameters or scaling or {})
    if by_kind:
        _drop_truncation(merged, is_older=not parameters)
    base = needed_value(config, "rope_theta", float, default_base)
    if scaling:
        older = _normal(scaling)
        if by_kind:
            _drop_truncation(older, is_older=True)
        if older.setdefault("rope_theta", base) != base:  # transformers 4 reads only the outer rope_theta
            _agree("rope_scaling", older, "config.json", {"rope_theta": base})
        if parameters:
            _agree("rope_parameters", {"rope_theta": base} | merged, "rope_scaling", older)
            _agree("rope_scaling", older, "rope_parameters", merged)
    elif "rope_theta" in config and "rope_theta" in merged:
        _agree("rope_parameters", merged, "config.json", {"rope_theta": base})
    merged.setdefault("rope_theta", base)
    outer = {name: config[name] for name in (_ORIGINAL,) if name in config}
    if outer and merged["rope_type"] in ("llama3", "yarn"):
        # only transformers 5 falls back to the outer length, and not with parameters per kind of layer
        if scaling or by_kind:
            merged.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
        merged = outer | merged
        _agree("rope_parameters", merged, "config.json", outer)
    return merged


def rope_without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns a config.json whose rotary parameters lack some fields."""
    objects = {kind: config[kind] for kind in ROPE_OBJECTS if isinstance(config.get(kind), dict)}
    reduced = {kind: {name: fields[name] for name in fields if name not in names} for kind, fields in objects.items()}
    return {**config, **reduced}


def _drop_truncation(parameters: dict[str, Any], is_older: bool) -> None:
    """Removes `truncate` where transformers 5 seeks it outside the kinds of layers, misses it, and truncates."""
    if parameters["rope_type"] != "yarn":
        return  # `_check_names` refuses the field
    if is_older and value_of(parameters, "truncate", bool, True) is False:
        raise DataError(
            "config.json: transformers 4 reads truncate=False in rope_scaling, but transformers 5, which has these "
            "parameters per kind of layer, ignores it; remove it if the model truncates"
        )
    parameters.pop("truncate", None)


def _object(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


def _normal(parameters: dict[str, Any]) -> dict[str, Any]:
    """Removes nulls, and renames `type` to `rope_type`; refuses both names with different values."""
    older, newer = parameters.get("type"), parameters.get("rope_type")
    if older is not None and newer not in (None, older):  # versions of transformers prefer different names
        _agree("the newer name", {"rope_type": newer}, "the older name `type`", {"rope_type": older})
    present = {name: value for name, value in parameters.items() if value is not None and name != "type"}
    return {"rope_type": older or "default", **present}


def _agree(source: str, values: Mapping[str, Any], other_source: str, expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if name not in values or values[name] != value:
            raise DataError(
                f"config.json: {source} has {shown_name(name)}={shown(values.get(name))}, but {other_source} has "
                f"{shown_name(name)}={shown(value)}; remove the wrong one"
            )


def read_rope(
    config: dict[str, Any], default_base: float, by_kind: bool = False, default_partial: float | None = None
) -> dict[str, Any]:
    """Returns the fields of `model.rope`, name -> value, that the file determines.

    Args:
        default_base: The family's base if the file has none.
        by_kind: Whether transformers 5 has these fields per kind of layer.
        default_partial: Rotating fraction of a head if the file has none; None if the family always rotates whole
            heads.
    """
    theirs = rope_parameters(config, default_base, by_kind)
    if needed_value(theirs, "rope_type", str) not in _TYPES:
        raise DataError(
            f"config.json: rope_type={shown_name(theirs['rope_type'])} is not supported, but one of "
            f"{', '.join(_TYPES)} is needed"
        )
    partial = _partial(theirs, config, 1.0 if default_partial is None else default_partial)
    if default_partial is None and partial != 1:
        raise DataError(
            f"config.json: {PARTIAL}={partial:g} is not supported, but 1 is needed: this family rotates whole heads"
        )
    scaling = _TYPES[theirs["rope_type"]]
    # refuses fields that this type does not read, because the type may be wrong
    _check_names(theirs, scaling)
    ours: dict[str, Any] = {"base": needed_value(theirs, "rope_theta", float), "scaling": scaling}
    ours |= {} if default_partial is None else {"partial": partial}
    for name, field in _FIELDS[scaling].items():
        if name in theirs:
            ours[field] = needed_value(theirs, name, _KINDS.get(name, float))
    return ours | _lengths(ours, config)


def _partial(theirs: dict[str, Any], config: dict[str, Any], default: float) -> float:
    """Reads the rotating fraction of a head, inside the parameters since transformers 5, and outside before."""
    outer = needed_value(config, PARTIAL, float) if config.get(PARTIAL) is not None else default
    inner = needed_value(theirs, PARTIAL, float, outer)
    # transformers 5 ignores an outer null, and transformers 4 does not look into rope_scaling
    if inner != outer and (config.get(PARTIAL) is not None or not config.get("rope_parameters")):
        _agree("rope_parameters or rope_scaling", {PARTIAL: inner}, "config.json", {PARTIAL: outer})
    return inner


def _check_names(theirs: dict[str, Any], scaling: str) -> None:
    known = {*_FIELDS[scaling], "rope_type", "rope_theta", PARTIAL}
    if unknown := sorted(theirs.keys() - known):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DataError(
            f"config.json: {shown_name(unknown[0])}={shown(theirs[unknown[0]])}{more} in the rotary parameters has no "
            f"meaning for rope_type={theirs['rope_type']}; remove it, or correct rope_type"
        )
    if missing := [name for name in _NEEDED[scaling] if name not in theirs]:
        raise DataError(f"config.json: rope_type={theirs['rope_type']} needs {missing[0]}, which is missing; add it")


def _lengths(ours: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns fields that transformers derives from max_position_embeddings if the rotary parameters lack them."""
    derived: dict[str, Any] = {}
    if ours["scaling"] in ("llama3", "yarn") and "original_max_positions" not in ours:
        derived["original_max_positions"] = needed_value(config, "max_position_embeddings", int)
    if ours["scaling"] == "yarn" and "factor" not in ours:
        original = (ours | derived)["original_max_positions"]
        if original > 0:  # validation of the model refuses another value
            derived["factor"] = needed_value(config, "max_position_embeddings", int) / original
    return derived


def written_rope(config: dict[str, Any], rope: RopeSection) -> dict[str, Any]:
    """Returns the changes that make a config.json describe `rope`, in the file's style."""
    theirs = {name: getattr(rope, field) for name, field in _FIELDS[rope.scaling].items()}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    # `proportional`, which only one family has, keeps its name
    kind = next((name for name, scaling in _TYPES.items() if scaling == rope.scaling), rope.scaling)
    base = plain_number(rope.base)
    # in the file's style, so that the version that wrote it can still read it
    if "rope_theta" in config and "rope_parameters" not in config:
        scaling = None if rope.scaling == "none" else {"rope_type": kind, **theirs}
        return {"rope_theta": base, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **theirs}}


def older_rope(
    parameters: dict[str, Any] | None, by_kind: bool = False, type_name: str = "rope_type"
) -> dict[str, Any]:
    """Returns the fields that transformers 4 needs instead of `rope_parameters`, without which it uses its defaults. If
    each kind of layer has its own, these are the parameters of layers without a window."""
    if not parameters:
        return {}  # the file has the older fields, or both versions use their defaults
    remaining = _normal(parameters)
    if by_kind:
        _drop_truncation(remaining, is_older=False)
    base = {name: remaining.pop(name) for name in ("rope_theta", PARTIAL) if name in remaining}
    kind = remaining.pop("rope_type")
    return {**base, "rope_scaling": None if kind == "default" else {type_name: kind, **remaining}}


def rope_differences(one: RopeSection, other: RopeSection) -> list[str]:
    """Returns the names of fields that make two sections rotate differently; ignores fields of other scalings."""
    names = ["base", "scaling", "interleaved", "local_base", "partial", "attention_temperature"]
    if one.scaling == other.scaling:
        # other fields may differ, since no angle depends on them
        names += _FIELDS[one.scaling].values()
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def plain_number(value: float) -> float | int:
    """Converts integral numbers to int, as transformers writes them."""
    return int(value) if value == int(value) else value
