"""Converts config.json to `model.*` and back, field by field, without loss.

An export starts from the file that came with the weights, and changes only fields that contradict the model, so it
keeps other fields (token ids, generation defaults, fields of newer versions).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final, get_args

from pydantic import ValidationError

from mtrain.base.errors import DataError
from mtrain.config.megatron_fields import PROVEN
from mtrain.config.messages import in_one_line
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
"""Part -> our field with its size; a model without the part has no such field, or 0."""


class InexpressibleError(DataError):
    """A family cannot describe the model."""

    def __init__(self, model_type: str, reasons: Mapping[str, str]) -> None:
        """`reasons` maps a key of `model.*` to how the family would change it."""
        listing = "; ".join(f"model.{key}{reason}" for key, reason in reasons.items())
        super().__init__(f"a config.json of {model_type} cannot express: {listing}; export it as another family")
        self.model_type = model_type
        self.keys = tuple(reasons)


DEPTHS = "num_nextn_predict_layers"
"""Field with the number of MTP depths, which transformers reads but neither computes nor writes."""


class Entry(ABC):
    """Converts some fields of config.json to some of ours, and back."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The fields of the file that this entry reads; `mtrain/hf/schema/registry.py` judges all others."""

    @property
    def part(self) -> str | None:
        """The part of a model, one of SIZES, to which the fields belong; None for the whole model."""
        return None

    @property
    def off(self) -> Mapping[str, Any]:
        """Field -> value, besides null, false and 0, that has no effect in another family's file."""
        return {}

    def sizes(self) -> Iterator[tuple[str, str]]:
        """Yields (part of a model, field of the file with its size)."""
        yield from ()

    @abstractmethod
    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns our fields, dotted name -> value, from the file."""

    @abstractmethod
    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        """Returns the changes that make the file describe the model."""

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that transformers 4 needs in addition to transformers 5's."""
        return {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        """Returns whether the file describes the model."""
        return all(lookup(model, name) == value for name, value in self.read(config).items())


@final
@dataclass(frozen=True)
class Field(Entry):
    """A field with the same value on both sides."""

    theirs: str
    ours: str
    default: Any = None
    """The family's value if the file has none."""
    resolved: str = ""
    """Property of the model with the effective value of our optional field."""
    alias: str = ""
    """Name of the field in files of other versions; empty without one."""
    without: Any = None
    """Value, besides 0 and null, of a model without the feature."""
    is_negated: bool = False
    """Whether the file's switch has the opposite meaning."""

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
            return {self.ours: None}  # `model_of` reports missing required fields
        read = value_of if may_be_null else needed_value
        # two names of one value must agree, because versions of transformers read different ones
        for alias in self.names:
            if alias in config and read(config, alias, kind, None) != config[name]:
                raise DataError(
                    f"config.json: {name}={shown(config[name])} contradicts {alias}={shown(config[alias])}, its other "
                    "name; remove one of them"
                )
        value = read(config, name, kind, self.default)
        return {self.ours: not value if self.is_negated else value}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        value = lookup(model, self.resolved or self.ours)
        if self.is_negated:
            value = not value
        # an integer if the family's default is one, because transformers writes 256, not 256.0
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            value = int(value)
        # under all names that the file has
        names = [name for name in self.names if name in config]
        return dict.fromkeys(names or (self.theirs,), value)

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        # both versions of transformers know `theirs`, but only one knows the alias
        return {self.theirs: config[self.alias]} if self.alias in config else {}


@final
@dataclass(frozen=True)
class Required(Entry):
    """A field that is supported with one value only."""

    theirs: str
    value: Any
    default: Any
    """The family's value if the file has none."""
    aliases: tuple[Any, ...] = ()
    part: str | None = None
    is_off: bool = False
    """Whether the value switches the feature off."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs,)

    @property
    def off(self) -> Mapping[str, Any]:
        return {self.theirs: self.value} if self.is_off else {}

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        value = config.get(self.theirs, self.default)
        # transformers fills a missing field with the default; 1 is not true, but 7 is 7.0
        is_bool = isinstance(value, bool)
        if not any(
            value == accepted and is_bool == isinstance(accepted, bool) for accepted in (self.value, *self.aliases)
        ):
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
        return {}  # `config_of` reports a model with another value


@final
@dataclass(frozen=True)
class Rope(Entry):
    default_base: float = 10000.0
    default_scaling: Mapping[str, Any] | None = None
    """The family's scaling, as in a file, if the file has none; None means no scaling."""
    older_type: str = "rope_type"
    """Name of the scaling's type in transformers 4."""
    default_partial: float | None = None
    """Rotating fraction of a head if the file has none; None if the family always rotates whole heads."""
    rotary_size: str | None = None
    """Field with the number of rotated dimensions, which some files have instead of the fraction."""
    is_scaled: bool = True
    unread: tuple[str, ...] = ()
    """Rotary parameters that only concern images; an export keeps them."""
    needs_scaling: bool = False
    """Whether transformers 4 looks for `unread` in rope_scaling, and fails without it."""

    @property
    def names(self) -> tuple[str, ...]:
        return ROPE_NAMES if self.rotary_size is None else (*ROPE_NAMES, self.rotary_size)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        config = rope_without(config, self.unread)
        is_unset = not config.get("rope_parameters") and not config.get("rope_scaling")
        if self.default_scaling is not None and is_unset and "rope_scaling" in config:
            raise DataError(
                f"config.json: rope_scaling={shown(config['rope_scaling'])} without rope_parameters means no scaling "
                f"in transformers 4, and rope_type={self.default_scaling['rope_type']} in transformers 5; add "
                "rope_parameters, or remove rope_scaling for the latter"
            )
        # the file's scaling, if any, replaces all of the family's
        if self.default_scaling is not None and is_unset:
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
        fields = read_rope(config, self.default_base, default_partial=partial)
        if not self.is_scaled and fields["scaling"] != "none":
            raise DataError(f"config.json: rope_type={fields['scaling']} is not supported here, but default is needed")
        return {f"rope.{name}": value for name, value in fields.items()}

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
        # transformers 5 uses the family's scaling if rope_scaling is null
        is_unscaled = self.default_scaling is not None and model.rope.scaling == "none"
        return changes | written_rope({}, model.rope) if is_unscaled else changes

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        parameters = config.get("rope_parameters") or {}
        fields = older_rope(parameters, type_name=self.older_type)
        if self.needs_scaling and parameters and fields["rope_scaling"] is None:
            kept = {name: parameters[name] for name in self.unread if name in parameters}
            fields["rope_scaling"] = {self.older_type: "default", **kept}
        return fields


@final
@dataclass(frozen=True)
class Computed(Entry):
    """A redundant field of the file, the sum of other fields."""

    theirs: str
    parts: Mapping[str, tuple[str, int]]
    """Field of the file -> (our field, the family's default)."""
    is_written: bool = False
    """Whether an export adds the field to a file that lacks it."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.theirs, *self.parts)

    @property
    def part(self) -> str | None:
        return next((section_of(ours) for ours, _ in self.parts.values()), None)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        stated = value_of(config, self.theirs, int, None)
        total = sum(needed_value(config, name, int, default) for name, (_, default) in self.parts.items())
        # transformers may read either, so both must agree
        if stated is not None and stated != total:
            raise DataError(
                f"config.json: {self.theirs}={stated} contradicts {' + '.join(self.parts)}={total}; correct the file"
            )
        return {}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {self.theirs: self._total(model)} if self.is_written or self.theirs in config else {}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return config.get(self.theirs) in (None, self._total(model))

    def _total(self, model: ModelSection) -> int:
        return sum(lookup(model, ours) or 0 for ours, _ in self.parts.values())


def heads(groups: int | None = None, head_dim: int | None = None) -> tuple[Field, Field]:
    """Builds the entries for the number of key/value heads and the size of a head.

    Without defaults, the number is that of query heads, which share the hidden size.
    """
    return (
        Field("num_key_value_heads", "num_query_groups", groups, "query_groups"),
        Field("head_dim", "head_dim", head_dim, "head_size"),
    )


def lookup(model: Any, dotted: str) -> Any:
    """Returns a field of a section by its dotted name; None if a nested section is None."""
    for name in dotted.split("."):
        model = None if model is None else getattr(model, name)
    return model


def _kind(dotted: str) -> tuple[type[Any], bool]:
    section: Any = ModelSection
    *parents, name = dotted.split(".")
    for parent in parents:
        options = _options(section, parent)
        # the annotation of an optional section is `Section | None`
        section = next(one for one in options if isinstance(one, type) and issubclass(one, Section))
    options = _options(section, name)
    return next(one for one in options if one is not type(None)), type(None) in options


def _options(section: type[Section], name: str) -> tuple[Any, ...]:
    annotation = section.model_fields[name].annotation
    return get_args(annotation) or (annotation,)


def model_of(config: dict[str, Any], entries: Sequence[Entry]) -> ModelSection:
    """Builds the model that a config.json describes."""
    nested: dict[str, Any] = {}
    for entry in entries:
        for dotted, value in entry.read(config).items():
            # several entries may fill one nested section
            *sections, name = dotted.split(".")
            target = nested
            for section in sections:
                target = target.setdefault(section, {})
            if value is not None:  # a missing field of ours has the same meaning
                target[name] = value
    return validated(nested)


def validated(content: dict[str, Any]) -> ModelSection:
    """Builds a model section from its keys."""
    try:
        return ModelSection.model_validate(content)
    except ValidationError as error:
        raise DataError(f"config.json describes a model that cannot be trained: {in_one_line(error)}") from None


def config_of(
    model: ModelSection, entries: Sequence[Entry], template: Mapping[str, Any], is_complete: bool
) -> dict[str, Any]:
    """Builds a config.json that describes the model; in a complete template, only differing fields change."""
    # a deep copy, so that the result shares no object with the caller's file
    config = copy.deepcopy(dict(template))
    for entry in entries:
        # keeps fields that agree as they are, so that exporting an import gives the same bytes
        if not is_complete or not entry.agrees(config, model):
            config.update(entry.write(config, model))
    # reads the result back, so that anything that the family cannot express shows as a difference
    written = model_of(config, entries)
    reasons = {}
    for name, expressed, model_value in differences(written, model):
        ours, read = ("a section" if isinstance(value, Section) else value for value in (model_value, expressed))
        reasons[name] = f"={ours} would become {read}"
    reasons |= {
        f"megatron.{name}": f"={value}, which changes what is computed"
        for name, value in inexpressible(model)
        if name not in written.megatron
    }
    if reasons:
        raise InexpressibleError(str(config.get("model_type")), reasons)
    return config


_NOT_ARCHITECTURE = {
    *("hf", "add_tokens", "add_special_tokens", "vocab_multiple", "backend", "hidden_dropout", "attention_dropout"),
    *("init_std", "megatron"),
}
"""Fields of `model.*` that config.json cannot express, or that do not affect the meaning of the weights."""
_TRAINING = ("dispatcher", "implementation", "bias_update_rate")
"""Fields of `model.experts` that only affect training."""
_FROZEN = {"freeze_tower", "freeze_projector", "freeze_language_model"}
"""Fields of `model.vision` that only affect training."""
_UNROTATED = "no_rope_freq"
"""Field of `model.megatron` that a family can express."""
_GROUPS = ("num_groups", "group_top_k", "group_score_top_k")

Difference = tuple[str, Any, Any]
"""Dotted name below `model`, and both values."""


def differences(one: ModelSection, other: ModelSection) -> list[Difference]:
    """Returns the differing fields of two architectures; fields of nested sections one by one."""
    differing: list[Difference] = []
    for name in ModelSection.model_fields:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name == "num_query_groups":
            # compares effective numbers, because None means as many as query heads
            mine, theirs = one.query_groups, other.query_groups
        elif name == "head_dim":
            mine, theirs = one.head_size, other.head_size
        elif name == "mtp_depths" and 0 in (mine, theirs):
            # a side without MTP depths says nothing about them
            continue
        if name == "rope":
            names = rope_differences(one.rope, other.rope)
            differing += [(f"rope.{field}", getattr(one.rope, field), getattr(other.rope, field)) for field in names]
        elif name in ("experts", "mla") and mine is not None and theirs is not None:
            mine, theirs = _comparable(one, name), _comparable(other, name)
            differing += [(f"{name}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]
        elif name == "vision" and mine is not None and theirs is not None:
            mine, theirs = (vision.model_dump(exclude=_FROZEN) for vision in (mine, theirs))
            differing += [(f"{name}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]
        elif name == "megatron" and one.megatron:
            # the other side's own fields are left to `inexpressible`, or come from the user
            if skipped_rotations(one) != skipped_rotations(other):
                differing.append((f"megatron.{_UNROTATED}", mine.get(_UNROTATED), theirs.get(_UNROTATED)))
        elif name not in _NOT_ARCHITECTURE and mine != theirs:
            differing.append((name, mine, theirs))
    return differing


def skipped_rotations(model: ModelSection) -> list[int]:
    """Returns a list with 1 for each layer without rotary positions, and 0 for the others."""
    frequency = model.megatron.get(_UNROTATED)
    if isinstance(frequency, list):
        return frequency
    return [int(frequency is not None and (layer + 1) % frequency == 0) for layer in range(model.num_layers)]


def inexpressible(model: ModelSection) -> list[tuple[str, Any]]:
    """Returns (field, value) of `model.megatron` that change the function but do not exist in config.json."""
    return [
        (name, value)
        for name, value in model.megatron.items()
        if name not in PROVEN or PROVEN[name].changes_the_function
    ]


def _comparable(model: ModelSection, name: str) -> dict[str, Any]:
    """Returns the fields of `experts` or `mla`, normalized so that equal meanings have equal values."""
    if name == "mla":
        assert model.mla is not None
        epsilon = model.norm_epsilon if model.mla.norm_epsilon is None else model.mla.norm_epsilon
        return model.mla.model_dump() | {"norm_epsilon": epsilon}
    assert model.experts is not None
    fields = {name: value for name, value in model.experts.model_dump().items() if name not in _TRAINING}
    # without groups, or if all are chosen, their number has no effect
    if model.experts.num_groups == model.experts.group_top_k:
        return fields | dict.fromkeys(_GROUPS)
    return fields | {"group_score_top_k": model.experts.num_scored}


def section_of(dotted: str) -> str | None:
    """Returns the part of SIZES to which one of our fields belongs; None for the whole model."""
    section, inside, _ = dotted.partition(".")
    return section if inside and section in SIZES else None
