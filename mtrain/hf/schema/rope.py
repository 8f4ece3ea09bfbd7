"""Rotary embeddings in config.json, in the forms of transformers 5 (`rope_parameters`) and earlier versions."""

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
"""Our scaling -> field in the file -> our field. Absent fields and null have the same default on both sides."""
_KINDS: dict[str, type[int] | type[bool]] = {_ORIGINAL: int, "truncate": bool}
"""Types of non-float fields."""


PARTIAL = "partial_rotary_factor"
ROPE_OBJECTS = ("rope_parameters", "rope_scaling")
"""Fields with the rotary parameters, in transformers 5 and before it."""
ROPE_NAMES = (*ROPE_OBJECTS, "rope_theta", PARTIAL, _ORIGINAL)
"""Fields of config.json that define the rotary embedding; the original length defaults to max_position_embeddings."""
_NEEDED = {"none": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
"""Our scaling -> fields without a default in transformers."""


def rope_parameters(config: dict[str, Any], default_base: float, by_kind: bool = False) -> dict[str, Any]:
    """Returns the rotary fields of a config.json in the terms of transformers 5, as `read_rope` takes them.

    transformers 4 reads `rope_scaling` with `rope_theta`; transformers 5 prefers them to `rope_parameters`. A file with
    both, or one that they read differently, must not contradict itself.
    """
    parameters, scaling = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    # one form, that of transformers 5; all code below is the same for both styles
    found = _normal(parameters or scaling or {})
    if by_kind:
        _drop_truncation(found, is_older=not parameters)
    base = needed_value(config, "rope_theta", float, default_base)
    if scaling:
        older = _normal(scaling)
        if by_kind:
            _drop_truncation(older, is_older=True)
        if older.setdefault("rope_theta", base) != base:  # transformers 4 reads only the outer one
            _agree("rope_scaling", older, "config.json", {"rope_theta": base})
        if parameters:
            _agree("rope_parameters", {"rope_theta": base} | found, "rope_scaling", older)
            _agree("rope_scaling", older, "rope_parameters", found)
    elif "rope_theta" in config and "rope_theta" in found:
        _agree("rope_parameters", found, "config.json", {"rope_theta": base})
    found.setdefault("rope_theta", base)
    outer = {name: config[name] for name in (_ORIGINAL,) if name in config}
    if outer and found["rope_type"] in ("llama3", "yarn"):
        # the outer one replaces a missing inner one only in transformers 5, and not where each kind has its own
        if scaling or by_kind:
            found.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
        found = outer | found
        _agree("rope_parameters", found, "config.json", outer)
    return found


def rope_without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns a config.json whose rotary parameters lack some fields."""
    given = {kind: config[kind] for kind in ROPE_OBJECTS if isinstance(config.get(kind), dict)}
    rest = {kind: {name: fields[name] for name in fields if name not in names} for kind, fields in given.items()}
    return {**config, **rest}


def _drop_truncation(found: dict[str, Any], is_older: bool) -> None:
    """Removes `truncate` if transformers 5 looks for it outside the kinds of layers, misses it and truncates."""
    if found["rope_type"] != "yarn":
        return  # refused as a field of another type
    if is_older and value_of(found, "truncate", bool, True) is False:
        raise DataError(
            "config.json: truncate=False in rope_scaling counts in transformers 4 and is ignored by transformers 5, "
            "which keeps these parameters for each kind of layer; remove it if the model truncates"
        )
    found.pop("truncate", None)


def _object(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


def _normal(parameters: dict[str, Any]) -> dict[str, Any]:
    """Removes nulls, and renames the type to its newer name; refuses two names with different values."""
    older, newer = parameters.get("type"), parameters.get("rope_type")
    if older is not None and newer not in (None, older):  # transformers 4 prefers the one, transformers 5 the other
        _agree("the newer name", {"rope_type": newer}, "the older name `type`", {"rope_type": older})
    found = {name: value for name, value in parameters.items() if value is not None and name != "type"}
    return {"rope_type": older or "default", **found}


def _agree(one: str, said: Mapping[str, Any], other: str, again: Mapping[str, Any]) -> None:
    for name, value in again.items():
        if name not in said or said[name] != value:
            raise DataError(
                f"config.json: {one} says {shown_name(name)}={shown(said.get(name))}, but {other} says "
                f"{shown_name(name)}={shown(value)}; remove the one that is wrong"
            )


def read_rope(
    config: dict[str, Any], default_base: float, by_kind: bool = False, default_partial: float | None = None
) -> dict[str, Any]:
    """Reads the fields of `model.rope` that differ from its defaults.

    Args:
        default_base: Base of the family if the file has none.
        by_kind: Whether transformers 5 keeps these fields per kind of layer.
        default_partial: Rotating fraction of a head if the file gives none; None: whole heads in every model of the
            family.
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
            f"config.json: {PARTIAL}={partial:g} is not supported, but 1 is needed: heads of this family rotate whole"
        )
    scaling = _TYPES[theirs["rope_type"]]
    # a field that this type does not read suggests a mistyped type
    _check_names(theirs, scaling)
    ours: dict[str, Any] = {"base": needed_value(theirs, "rope_theta", float), "scaling": scaling}
    ours |= {} if default_partial is None else {"partial": partial}
    for name, field in _FIELDS[scaling].items():
        if name in theirs:
            ours[field] = needed_value(theirs, name, _KINDS.get(name, float))
    return ours | _lengths(ours, config)


def _partial(theirs: dict[str, Any], config: dict[str, Any], default: float) -> float:
    """Reads the rotating fraction of a head: among the parameters in files of transformers 5, outside them in older
    ones."""
    outer = needed_value(config, PARTIAL, float) if config.get(PARTIAL) is not None else default
    inner = needed_value(theirs, PARTIAL, float, outer)
    # null outside says nothing to transformers 5; transformers 4 does not look into rope_scaling
    if inner != outer and (config.get(PARTIAL) is not None or not config.get("rope_parameters")):
        _agree("rope_parameters or rope_scaling", {PARTIAL: inner}, "config.json", {PARTIAL: outer})
    return inner


def _check_names(theirs: dict[str, Any], scaling: str) -> None:
    known = {*_FIELDS[scaling], "rope_type", "rope_theta", PARTIAL}
    if unknown := sorted(theirs.keys() - known):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise DataError(
            f"config.json: {shown_name(unknown[0])}={shown(theirs[unknown[0]])}{more} in the rotary parameters means "
            f"nothing for rope_type={theirs['rope_type']}; remove it, or correct rope_type"
        )
    if missing := [name for name in _NEEDED[scaling] if name not in theirs]:
        raise DataError(f"config.json: rope_type={theirs['rope_type']} needs {missing[0]}, which is not given; add it")


def _lengths(ours: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns values that transformers derives from the model's longest sequence if the rotary parameters lack them."""
    found: dict[str, Any] = {}
    if ours["scaling"] in ("llama3", "yarn") and "original_max_positions" not in ours:
        found["original_max_positions"] = needed_value(config, "max_position_embeddings", int)
    if ours["scaling"] == "yarn" and "factor" not in ours:
        original = (ours | found)["original_max_positions"]
        if original > 0:  # another value is refused with the model
            found["factor"] = needed_value(config, "max_position_embeddings", int) / original
    return found


def written_rope(config: dict[str, Any], rope: RopeSection) -> dict[str, Any]:
    """Returns the changes of a config.json that make it describe `rope`, in the style of the file."""
    theirs = {name: getattr(rope, field) for name, field in _FIELDS[rope.scaling].items()}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    # proportional, which only one family has, by its own name
    kind = next((name for name, scaling in _TYPES.items() if scaling == rope.scaling), rope.scaling)
    base = plain_number(rope.base)
    # in the style of the file, so that the version that wrote it can still read it
    if "rope_theta" in config and "rope_parameters" not in config:
        scaling = None if rope.scaling == "none" else {"rope_type": kind, **theirs}
        return {"rope_theta": base, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **theirs}}


def older_rope(
    parameters: dict[str, Any] | None, by_kind: bool = False, type_name: str = "rope_type"
) -> dict[str, Any]:
    """Returns the fields that transformers 4 needs instead of `rope_parameters`; without them it rotates by its
    defaults. If each kind of layer has its own, it takes those of layers without a window."""
    if not parameters:
        return {}  # the file has the older fields, or both versions take their default
    found = _normal(parameters)
    if by_kind:
        _drop_truncation(found, is_older=False)
    base = {name: found.pop(name) for name in ("rope_theta", PARTIAL) if name in found}
    kind = found.pop("rope_type")
    return {**base, "rope_scaling": None if kind == "default" else {type_name: kind, **found}}


def rope_differences(one: RopeSection, other: RopeSection) -> list[str]:
    """Returns the names of fields that make two sections rotate differently; fields of other scalings do not count."""
    names = ["base", "scaling", "interleaved", "local_base", "partial", "attention_temperature"]
    if one.scaling == other.scaling:
        # fields that this scaling does not read may differ: no angle depends on them
        names += _FIELDS[one.scaling].values()
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def plain_number(value: float) -> float | int:
    """Returns integral numbers as int, as transformers writes them."""
    return int(value) if value == int(value) else value
