"""Comparison of two descriptions of a model: whether they mean the same function of the same weights."""

from __future__ import annotations

from typing import Any

from mtrain.config.megatron_fields import PROVEN
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.rope import rope_differences

_NOT_ARCHITECTURE = {"hf", "vocab_multiple", "backend", "hidden_dropout", "attention_dropout", "init_std", "megatron"}
"""Fields of `model.*` that config.json cannot express, or that do not change the meaning of the weights."""
_TRAINING = ("dispatcher", "implementation", "bias_update_rate")
"""Fields of `model.experts` that concern training, not the function."""
_GROUPS = ("num_groups", "group_top_k", "group_score_top_k")

Difference = tuple[str, Any, Any]
"""Dotted name below `model`, and both values."""


def differences(one: ModelSection, other: ModelSection) -> list[Difference]:
    """Returns the fields of the architecture that differ, those of sections by their own names."""
    found: list[Difference] = []
    for name in ModelSection.model_fields:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name == "num_query_groups":
            # left out means as many as heads: the resulting numbers are compared
            mine, theirs = one.query_groups, other.query_groups
        elif name == "head_dim":
            mine, theirs = one.head_size, other.head_size
        elif name == "mtp_depths" and 0 in (mine, theirs):
            # where one side has no depths, nothing is known about the layers that both have
            continue
        if name == "rope":
            names = rope_differences(one.rope, other.rope)
            found += [(f"rope.{each}", getattr(one.rope, each), getattr(other.rope, each)) for each in names]
        elif name in ("experts", "mla") and mine is not None and theirs is not None:
            found += _inside(name, _meant(one, name), _meant(other, name))
        elif name not in _NOT_ARCHITECTURE and mine != theirs:
            found.append((name, mine, theirs))
    return found


def unsayable(model: ModelSection) -> list[tuple[str, Any]]:
    """Returns the fields passed through to megatron-core that change the function, which config.json cannot express,
    with their values."""
    return [
        (name, value)
        for name, value in model.megatron.items()
        if name not in PROVEN or PROVEN[name].changes_the_function
    ]


def _inside(section: str, one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    return [(f"{section}.{name}", one[name], other[name]) for name in one if one[name] != other[name]]


def _meant(model: ModelSection, name: str) -> dict[str, Any]:
    """Returns a section's fields, with equal values where they mean the same."""
    if name == "experts":
        assert model.experts is not None
        return _meant_by(model.experts)
    assert model.mla is not None
    epsilon = model.norm_epsilon if model.mla.norm_epsilon is None else model.mla.norm_epsilon
    return model.mla.model_dump() | {"norm_epsilon": epsilon}


def _meant_by(experts: ExpertsSection) -> dict[str, Any]:
    fields = {name: value for name, value in experts.model_dump().items() if name not in _TRAINING}
    if experts.num_groups == experts.group_top_k:  # no groups, or all of them: every expert may be chosen
        # their number then has no effect
        return fields | dict.fromkeys(_GROUPS)
    return fields | {"group_score_top_k": experts.num_scored}
