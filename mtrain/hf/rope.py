"""Rotary embeddings in config.json, as transformers 5 writes them (`rope_parameters`) and as older versions did."""

from __future__ import annotations

from typing import Any

from mtrain.config.model import RopeSection
from mtrain.errors import DataError

_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_FIELDS = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
"""Our scaling -> their field -> ours. What is not there or null has the default, which is the same on both sides."""


def rope_parameters(config: dict[str, Any], default_base: float, local: str | None = None) -> dict[str, Any]:
    """The rotary fields of a config.json in the words of transformers 5.

    Args:
        config: Content of the file.
        default_base: What the family has where the file says nothing.
        local: Where each kind of attention has its own parameters: the kind.
    """
    parameters = config.get("rope_parameters")
    if parameters is None:
        parameters = {**(config.get("rope_scaling") or {})}
        parameters.setdefault("rope_theta", config.get("rope_theta", default_base))
    elif local is not None and local in parameters:
        parameters = parameters[local]
    found = {"rope_theta": config.get("rope_theta", default_base), **parameters}
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    found.pop("type", None)
    return found


def read_rope(config: dict[str, Any], default_base: float, kind: str | None = None) -> dict[str, Any]:
    """Fields of `model.rope` that differ from its defaults.

    Raises:
        DataError: The scaling is one that is not supported.
    """
    theirs = rope_parameters(config, default_base, kind)
    if theirs["rope_type"] not in _TYPES:
        raise DataError(
            f"config.json: rope_type={theirs['rope_type']} is not supported, but one of {', '.join(_TYPES)} is needed"
        )
    if theirs.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise DataError("config.json: partial_rotary_factor must be 1: heads that rotate in part are not supported")
    scaling = _TYPES[theirs["rope_type"]]
    ours: dict[str, Any] = {"base": float(theirs["rope_theta"]), "scaling": scaling}
    for name, field in _FIELDS[scaling].items():
        if theirs.get(name) is not None:
            ours[field] = theirs[name]
    if scaling == "yarn" and "original_max_positions" not in ours:
        ours["original_max_positions"] = config.get("max_position_embeddings")
    return ours


def written_rope(config: dict[str, Any], rope: RopeSection) -> dict[str, Any]:
    """The changes of a config.json that make it say `rope`, in the style that it has."""
    theirs = {name: getattr(rope, field) for name, field in _FIELDS[rope.scaling].items()}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    kind = next(name for name, scaling in _TYPES.items() if scaling == rope.scaling)
    base = _plain(rope.base)
    if "rope_theta" in config and "rope_parameters" not in config:
        scaling = None if rope.scaling == "none" else {"rope_type": kind, **theirs}
        return {"rope_theta": base, "rope_scaling": scaling}
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **theirs}}


def same_rope(one: RopeSection, other: RopeSection) -> bool:
    """Whether two sections turn by the same angles: fields of other scalings do not count."""
    if (one.base, one.scaling, one.interleaved, one.local_base) != (
        other.base,
        other.scaling,
        other.interleaved,
        other.local_base,
    ):
        return False
    return all(getattr(one, field) == getattr(other, field) for field in _FIELDS[one.scaling].values())


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value
