"""config.json <-> `model.*`, field by field and without loss.

An export starts from the file that the weights came with and changes only what the model no longer says, so that
whatever is not ours (token ids, generation defaults, fields of newer versions) stays as it was.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from pydantic import ValidationError

from mtrain.config.messages import readable
from mtrain.config.model import ModelSection
from mtrain.errors import DataError
from mtrain.hf.rope import read_rope, same_rope, written_rope

DEPTHS = "num_nextn_predict_layers"
"""Predictions further ahead, which transformers configures but neither computes nor writes."""
_NOT_ARCHITECTURE = {"hf", "vocab_multiple", "backend", "hidden_dropout", "attention_dropout", "init_std", "megatron"}
"""Fields of `model.*` that config.json has no word for, or that do not change what the weights mean."""


class Entry(ABC):
    """What some fields of config.json and some of ours say to each other."""

    @abstractmethod
    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        """Our fields, dotted, as the file says them.

        Raises:
            DataError: The file says something that is not supported.
        """

    @abstractmethod
    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        """Changes of the file that make it say what the model says."""

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        """Whether the file says what the model says."""
        return all(lookup(model, name) == value for name, value in self.read(config).items())


@final
@dataclass(frozen=True)
class Field(Entry):
    """A value that both have."""

    theirs: str
    ours: str
    default: Any = None
    """What the family has where the file says nothing."""
    resolved: str = ""
    """Property of the model that gives the value where ours may be left out."""
    alias: str = ""
    """Another name of the field, in files of other versions."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {self.ours: config.get(self._name(config), self.default)}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        value = lookup(model, self.resolved or self.ours)
        whole = isinstance(self.default, int) and isinstance(value, float) and value.is_integer()
        return {self._name(config): int(value) if whole else value}

    def _name(self, config: dict[str, Any]) -> str:
        return self.alias if self.alias in config else self.theirs


@final
@dataclass(frozen=True)
class Needed(Entry):
    """A field of the file that must have one value, because nothing else is supported."""

    theirs: str
    value: Any
    default: Any
    """What the family has where the file says nothing."""
    aliases: tuple[Any, ...] = ()
    """Values that mean the same."""

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        value = config.get(self.theirs, self.default)
        if value != self.value and value not in self.aliases:
            raise DataError(f"config.json: {self.theirs}={value!r} is not supported, but {self.value!r} is needed")
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {self.theirs: self.value}


@final
@dataclass(frozen=True)
class Given(Entry):
    """A field of ours that every model of the family has alike."""

    ours: str
    value: Any

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {self.ours: self.value}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {}  # told by `config_of`, where the file and the model still differ


@final
@dataclass(frozen=True)
class Rope(Entry):
    """The rotary embedding."""

    default_base: float = 10000.0

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {f"rope.{name}": value for name, value in read_rope(config, self.default_base).items()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return written_rope(config, model.rope)


@final
@dataclass(frozen=True)
class Derived(Entry):
    """A field of the file that says once more what others say."""

    theirs: str
    ours: str

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {self.theirs: lookup(model, self.ours)}


def heads(groups: int | None = None, head_dim: int | None = None) -> tuple[Field, Field]:
    """Key/value heads and the size of a head.

    Args:
        groups: The family's default; None: as many as query heads.
        head_dim: The family's default; None: hidden_size / num_attention_heads.
    """
    return (
        Field("num_key_value_heads", "num_query_groups", groups, "query_groups"),
        Field("head_dim", "head_dim", head_dim, "head_size"),
    )


def lookup(model: Any, dotted: str) -> Any:
    """A field of a section or of a section inside it; None inside a section that is not there."""
    for name in dotted.split("."):
        model = None if model is None else getattr(model, name)
    return model


def model_of(config: dict[str, Any], entries: Sequence[Entry]) -> ModelSection:
    """The architecture that a config.json describes.

    Raises:
        DataError: A field is missing, wrong or not supported.
    """
    nested: dict[str, Any] = {}
    for entry in entries:
        for dotted, value in entry.read(config).items():
            *sections, name = dotted.split(".")
            target = nested
            for section in sections:
                target = target.setdefault(section, {})
            if value is not None:  # ours have the same meaning where they are left out
                target[name] = value
    try:
        return ModelSection.model_validate(nested)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise DataError(f"config.json describes no model that can be trained: {reasons}") from None


def config_of(
    model: ModelSection, entries: Sequence[Entry], template: Mapping[str, Any], is_complete: bool
) -> dict[str, Any]:
    """A config.json that describes the model.

    Args:
        model: The architecture.
        entries: Of the family.
        template: The file to start from.
        is_complete: Whether the template is a whole file, of which only what differs is changed.

    Raises:
        DataError: The family cannot describe this model.
    """
    config = copy.deepcopy(dict(template))
    for entry in entries:
        if not is_complete or not entry.agrees(config, model):
            config.update(entry.write(config, model))
    said = model_of(config, entries)
    if differing := differences(said, model):
        told = "; ".join(f"model.{name}={mine} would be {theirs}" for name, theirs, mine in differing)
        raise DataError(f"a {config.get('model_type')} model cannot say: {told}; export it as another family")
    return config


def differences(one: ModelSection, other: ModelSection) -> list[tuple[str, Any, Any]]:
    """Fields of the architecture that differ, with both values."""
    found = []
    for name in ModelSection.model_fields:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name == "num_query_groups":
            mine, theirs = one.query_groups, other.query_groups
        elif name == "head_dim":
            mine, theirs = one.head_size, other.head_size
        elif (name == "rope" and same_rope(mine, theirs)) or (name == "mtp_depths" and 0 in (mine, theirs)):
            continue
        if name not in _NOT_ARCHITECTURE and mine != theirs:
            found.append((name, mine, theirs))
    return found
