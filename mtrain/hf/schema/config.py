"""config.json <-> `model.*`, field by field and without loss.

An export starts from the file that came with the weights and changes only what the model contradicts, so other fields
(token ids, generation defaults, fields of newer versions) stay.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final, get_args

from pydantic import ValidationError

from mtrain.base.errors import DataError
from mtrain.config.megatron_fields import PROVEN
from mtrain.config.messages import readable
from mtrain.config.schema.model import RECURRENT, ModelSection
from mtrain.config.schema.section import Section
from mtrain.hf.schema.rope import (
    PARTIAL,
    ROPE_NAMES,
    ROPE_OBJECTS,
    older_rope,
    read_rope,
    rope_differences,
    rope_without,
    written_rope,
)
from mtrain.hf.schema.values import needed_value, shown, value_of

SIZES: Mapping[str, str] = {
    "experts": "experts.num_experts",
    "mla": "mla.kv_lora_rank",
    **{key: f"{key}.{section.size}" for key, section in RECURRENT.items()},
    "sliding_window": "sliding_window",
}
"""Part -> our field with its size: absent or 0 in the file, the model has no such part."""


class UnsayableError(DataError):
    """A model that a family cannot describe."""

    def __init__(self, model_type: str, reasons: Mapping[str, str]) -> None:
        """Takes reasons by key of `model.*`: what the family would make of it."""
        listing = "; ".join(f"model.{key}{reason}" for key, reason in reasons.items())
        super().__init__(f"a config.json of {model_type} cannot express: {listing}; export it as another family")
        self.model_type = model_type
        self.keys = tuple(reasons)


DEPTHS = "num_nextn_predict_layers"
"""Field for MTP depths, which transformers configures but neither computes nor writes."""


class Entry(ABC):
    """Conversion between some fields of config.json and some of ours."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Returns the fields of the file that are read; `mtrain/hf/schema/registry.py` judges all others."""

    @property
    def part(self) -> str | None:
        """Returns the part of a model, one of SIZES, to which the fields belong, if any."""
        return None

    @property
    def off(self) -> Mapping[str, Any]:
        """Returns field -> value that, besides null, false and 0, switches nothing on in another family's file."""
        return {}

    def sizes(self) -> Iterator[tuple[str, str]]:
        """Yields parts of a model, each with a field that gives its size."""
        yield from ()

    @abstractmethod
    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        """Reads our fields, by dotted name, from the file."""

    @abstractmethod
    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        """Returns the changes that make the file describe the model."""

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns fields for transformers 4 that the file has only for transformers 5."""
        return {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        """Says whether the file describes the model."""
        return all(lookup(model, name) == value for name, value in self.read(config).items())


@final
@dataclass(frozen=True)
class Field(Entry):
    """A value that both sides have."""

    theirs: str
    ours: str
    default: Any = None
    """The family's value if the file has none."""
    resolved: str = ""
    """Property of the model with the effective value of an optional field of ours."""
    alias: str = ""
    """Name of the field in files of other versions, if any."""
    without: Any = None
    """Value, besides 0 and null, of a model without the feature."""
    is_negated: bool = False
    """Whether the switch has the opposite meaning in the file."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs, self.alias) if self.alias else (self.theirs,)

    @property
    def part(self) -> str | None:
        return section_of(self.ours)

    @property
    def off(self) -> Mapping[str, Any]:
        return dict.fromkeys(self.names, self.without)

    def sizes(self) -> Iterator[tuple[str, str]]:
        yield from ((part, name) for part, ours in SIZES.items() if ours == self.ours for name in self.names)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        kind, may_be_null = _kind(self.ours)
        name = self.theirs if self.theirs in config or self.alias not in config else self.alias
        if name not in config and self.default is None:
            return {self.ours: None}  # required ones are reported when the model is made
        read = value_of if may_be_null else needed_value
        # two names of one value must agree: which of them transformers reads depends on its version
        for each in self.names:
            if each in config and read(config, each, kind, None) != config[name]:
                raise DataError(
                    f"config.json: {name}={shown(config[name])} and {each}={shown(config[each])} are two names of one "
                    "value; remove one of them"
                )
        value = read(config, name, kind, self.default)
        return {self.ours: not value if self.is_negated else value}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        value = lookup(model, self.resolved or self.ours)
        if self.is_negated:
            value = not value
        # an integer where the family has one: transformers writes 256, not 256.0
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        # under the names that the file has, both if it has both
        names = [name for name in self.names if name in config]
        return dict.fromkeys(names or (self.theirs,), value)

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        # an alias is a name of one version, `theirs` is known to both
        return {self.theirs: config[self.alias]} if self.alias in config else {}


@final
@dataclass(frozen=True)
class Required(Entry):
    """A field that must have one value, because nothing else is supported."""

    theirs: str
    value: Any
    default: Any
    """The family's value if the file has none."""
    aliases: tuple[Any, ...] = ()
    part: str | None = None
    is_off: bool = False
    """Whether the value means that a model lacks the feature."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    @property
    def off(self) -> Mapping[str, Any]:
        return {self.theirs: self.value} if self.is_off else {}

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        value = config.get(self.theirs, self.default)
        # the default counts where the field is left out, as transformers fills it in; 1 is not true, but 7 is 7.0
        is_bool = isinstance(value, bool)
        if not any(value == one and is_bool == isinstance(one, bool) for one in (self.value, *self.aliases)):
            raise DataError(f"config.json: {self.theirs}={shown(value)} is not supported, but {self.value!r} is needed")
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {self.theirs: self.value}


@final
@dataclass(frozen=True)
class Constant(Entry):
    """A field of ours with the same value in every model of the family."""

    ours: str
    value: Any

    names = ()

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        return {self.ours: self.value}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {}  # reported by `config_of`, where the file and the model still differ


@final
@dataclass(frozen=True)
class Rope(Entry):
    default_base: float = 10000.0
    default_scaling: Mapping[str, Any] | None = None
    """The family's scaling, in its own terms, if the file gives none; None: no scaling."""
    older_type: str = "rope_type"
    """Name of the scaling's type in transformers 4."""
    default_partial: float | None = None
    """Rotating fraction of a head if the file gives none; None: whole heads in every model of the family."""
    rotary_size: str | None = None
    """Field with the number of rotated dimensions, which some files have instead of the fraction."""
    is_scaled: bool = True
    unread: tuple[str, ...] = ()
    """Rotary parameters that concern images alone; a file keeps them."""

    @property
    def names(self) -> tuple[str, ...]:
        return ROPE_NAMES if self.rotary_size is None else (*ROPE_NAMES, self.rotary_size)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        config = rope_without(config, self.unread)
        silent = not config.get("rope_parameters") and not config.get("rope_scaling")
        if self.default_scaling is not None and silent and "rope_scaling" in config:
            raise DataError(
                f"config.json: rope_scaling={shown(config['rope_scaling'])} without rope_parameters is no scaling in "
                f"transformers 4, and rope_type={self.default_scaling['rope_type']} in transformers 5; give "
                "rope_parameters, or remove rope_scaling for the latter"
            )
        # the family's scaling counts only where the file says nothing: an explicit one replaces it as a whole
        if self.default_scaling is not None and silent:
            config = {**config, "rope_scaling": {**self.default_scaling}}
        partial = self.default_partial
        if self.rotary_size is not None and config.get(self.rotary_size) is not None:
            partial = needed_value(config, self.rotary_size, int) / needed_value(config, "head_dim", int)
            if needed_value(config, PARTIAL, float, partial) != partial:
                raise DataError(
                    f"config.json: {self.rotary_size}={config[self.rotary_size]} contradicts {PARTIAL}="
                    f"{shown(config[PARTIAL])}; remove the one that is wrong"
                )
            config = {**config, PARTIAL: partial}  # as transformers does
        found = read_rope(config, self.default_base, default_partial=partial)
        if not self.is_scaled and found["scaling"] != "none":
            raise DataError(f"config.json: rope_type={found['scaling']} is not supported here, but default is needed")
        return {f"rope.{name}": value for name, value in found.items()}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        changes = written_rope(config, model.rope)
        sizes = [name for name in (self.rotary_size,) if name is not None and name in config]
        changes |= dict.fromkeys(sizes, model.rotary_size)
        if self.default_partial is not None:
            if "rope_parameters" in changes:
                changes["rope_parameters"][PARTIAL] = model.rope.partial
            if PARTIAL in config or not (sizes or "rope_parameters" in changes):
                changes[PARTIAL] = model.rope.partial
        for kind in ROPE_OBJECTS if self.unread else ():
            if changes.get(kind) and isinstance(config.get(kind), dict):
                changes[kind] |= {name: config[kind][name] for name in self.unread if name in config[kind]}
        # transformers 5 takes the family's scaling where rope_scaling is null
        is_unscaled = self.default_scaling is not None and model.rope.scaling == "none"
        return changes | written_rope({}, model.rope) if is_unscaled else changes

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        return older_rope(config.get("rope_parameters"), type_name=self.older_type)


@final
@dataclass(frozen=True)
class Computed(Entry):
    """A redundant field of the file: the sum of some of ours."""

    theirs: str
    parts: Mapping[str, tuple[str, int]]
    """Field of the file -> our field and the family's default."""
    is_written: bool = False
    """Whether the field is added to a file that lacks it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs, *self.parts)

    @property
    def part(self) -> str | None:
        return next((section_of(ours) for ours, _ in self.parts.values()), None)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        given = value_of(config, self.theirs, int, None)
        total = sum(needed_value(config, name, int, default) for name, (_, default) in self.parts.items())
        # transformers may read either, so a contradiction has no correct side
        if given is not None and given != total:
            raise DataError(
                f"config.json: {self.theirs}={given} contradicts {' + '.join(self.parts)}={total}; correct the file"
            )
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {self.theirs: self._said(model)} if self.is_written or self.theirs in config else {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return config.get(self.theirs) in (None, self._said(model))

    def _said(self, model: ModelSection) -> int:
        return sum(lookup(model, ours) or 0 for ours, _ in self.parts.values())


def heads(groups: int | None = None, head_dim: int | None = None) -> tuple[Field, Field]:
    """Builds the entries for the number of key/value heads and the size of a head.

    Without defaults there are as many as query heads, and they share the hidden size.
    """
    return (
        Field("num_key_value_heads", "num_query_groups", groups, "query_groups"),
        Field("head_dim", "head_dim", head_dim, "head_size"),
    )


def lookup(model: Any, dotted: str) -> Any:
    """Returns a field of a section or nested section; None if the nested section is absent."""
    for name in dotted.split("."):
        model = None if model is None else getattr(model, name)
    return model


def _kind(dotted: str) -> tuple[type[Any], bool]:
    section: Any = ModelSection
    *parents, name = dotted.split(".")
    for parent in parents:
        options = _options(section, parent)
        # an optional section is annotated as `Section | None`
        section = next(one for one in options if isinstance(one, type) and issubclass(one, Section))
    options = _options(section, name)
    return next(one for one in options if one is not type(None)), type(None) in options


def _options(section: type[Section], name: str) -> tuple[Any, ...]:
    annotation = section.model_fields[name].annotation
    return get_args(annotation) or (annotation,)


def model_of(config: dict[str, Any], entries: Sequence[Entry]) -> ModelSection:
    """Builds the architecture that a config.json describes."""
    nested: dict[str, Any] = {}
    for entry in entries:
        for dotted, value in entry.read(config).items():
            # dotted names, because several entries fill one nested section
            *sections, name = dotted.split(".")
            target = nested
            for section in sections:
                target = target.setdefault(section, {})
            if value is not None:  # our fields have the same meaning where they are left out
                target[name] = value
    return validated(nested)


def validated(content: dict[str, Any]) -> ModelSection:
    """Builds the section of a model from its keys."""
    try:
        return ModelSection.model_validate(content)
    except ValidationError as error:
        reasons = "; ".join(line for detail in error.errors(include_url=False) for line in readable(detail))
        raise DataError(f"config.json describes no model that can be trained: {reasons}") from None


def config_of(
    model: ModelSection, entries: Sequence[Entry], template: Mapping[str, Any], is_complete: bool
) -> dict[str, Any]:
    """Builds a config.json that describes the model; of a complete template only differing fields change."""
    # deep: the result must share no object with the caller's file
    config = copy.deepcopy(dict(template))
    for entry in entries:
        # fields that already agree stay as they are written, so that an import that is exported again has the same
        # bytes
        if not is_complete or not entry.agrees(config, model):
            config.update(entry.write(config, model))
    # Read back what was written: whatever the family cannot express shows as a difference here, field by field, so no
    # entry has to know what it cannot express.
    said = model_of(config, entries)
    reasons = {}
    for name, theirs, mine in differences(said, model):
        ours, read = ("a section" if isinstance(value, Section) else value for value in (mine, theirs))
        reasons[name] = f"={ours} would be {read}"
    reasons |= {
        f"megatron.{name}": f"={value}, which changes what is computed"
        for name, value in unsayable(model)
        if name not in said.megatron
    }
    if reasons:
        raise UnsayableError(str(config.get("model_type")), reasons)
    return config


_NOT_ARCHITECTURE = {
    *("hf", "add_tokens", "add_special_tokens", "vocab_multiple", "backend", "hidden_dropout", "attention_dropout"),
    *("init_std", "megatron"),
}
"""Fields of `model.*` that config.json cannot express, or that do not affect the weights' meaning."""
_TRAINING = ("dispatcher", "implementation", "bias_update_rate")
"""Fields of `model.experts` that concern only training."""
_UNROTATED = "no_rope_freq"
"""Field of `model.megatron` that a family can express."""
_GROUPS = ("num_groups", "group_top_k", "group_score_top_k")

Difference = tuple[str, Any, Any]  # dotted name below `model`, and both values


def differences(one: ModelSection, other: ModelSection) -> list[Difference]:
    """Returns the differing fields of two architectures; those of sections by their own names."""
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
            mine, theirs = _meant(one, name), _meant(other, name)
            found += [(f"{name}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]
        elif name == "megatron" and one.megatron:
            # what only the other side has is judged by `unsayable`, or was added by the user
            if skipped_rotations(one) != skipped_rotations(other):
                found.append((f"megatron.{_UNROTATED}", mine.get(_UNROTATED), theirs.get(_UNROTATED)))
        elif name not in _NOT_ARCHITECTURE and mine != theirs:
            found.append((name, mine, theirs))
    return found


def skipped_rotations(model: ModelSection) -> list[int]:
    """Returns 1 for each layer without rotary positions, else 0."""
    given = model.megatron.get(_UNROTATED)
    if isinstance(given, list):
        return given
    return [int(given is not None and (layer + 1) % given == 0) for layer in range(model.num_layers)]


def unsayable(model: ModelSection) -> list[tuple[str, Any]]:
    """Returns the fields, with values, that are passed to megatron-core, change the function and do not exist in
    config.json."""
    return [
        (name, value)
        for name, value in model.megatron.items()
        if name not in PROVEN or PROVEN[name].changes_the_function
    ]


def _meant(model: ModelSection, name: str) -> dict[str, Any]:
    """Returns the fields of `experts` or `mla`, with equal values for equal meanings."""
    if name == "mla":
        assert model.mla is not None
        epsilon = model.norm_epsilon if model.mla.norm_epsilon is None else model.mla.norm_epsilon
        return model.mla.model_dump() | {"norm_epsilon": epsilon}
    assert model.experts is not None
    fields = {name: value for name, value in model.experts.model_dump().items() if name not in _TRAINING}
    if model.experts.num_groups == model.experts.group_top_k:  # no groups, or all of them: every expert may be chosen
        # their number then has no effect
        return fields | dict.fromkeys(_GROUPS)
    return fields | {"group_score_top_k": model.experts.num_scored}


def section_of(dotted: str) -> str | None:
    """Returns the part to which one of our fields belongs, by its section, if any."""
    section, inside, _ = dotted.partition(".")
    return section if inside and section in SIZES else None
