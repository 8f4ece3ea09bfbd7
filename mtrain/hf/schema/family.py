"""A model family: converts its config.json, and names its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mtrain.arch.features import kinds, present
from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import DEPTHS, Entry, config_of, model_of, validated
from mtrain.hf.schema.table import Rule, Table, TensorPattern, build_table
from mtrain.hf.schema.tower import TEXT, TIED, Tower
from mtrain.hf.schema.vision import vision_of, with_tower

BASE = "model."
_IN_BASE = ("layers.", "embed_tokens.")
"""Prefixes of names in files saved from a base model."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Family:
    """Models with one Hugging Face `model_type`, which share the meaning of config.json and the names of tensors."""

    model_type: str
    architecture: str
    entries: tuple[Entry, ...]
    rules: tuple[Rule, ...]
    dropped: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb(_local)?\.(original_)?inv_freq",)
    """Patterns of tensors in old files that config.json determines."""
    inert: tuple[str, ...] = ()
    """Fields that transformers ignores in this family, but not in others."""
    base: str = BASE
    """Prefix of all tensor names except heads."""
    outside: str = ""
    """Prefix of the names of heads."""
    tower: Tower | None = None
    """Position in a multimodal model; None for a text model."""
    renamed: tuple[str, str] | None = None
    """Prefix of the published names, and transformers' prefix in memory; None if they are the same."""
    carried_names: tuple[str, ...] = ()
    """Patterns of further tensors, besides those of images, that conversions copy without reading them."""
    ahead: str = ""
    """Prefix of an MTP layer's names, if it is read only on request (`mtp_depths`) and otherwise copied; empty if
    config.json decides."""
    is_ahead_read: bool = False
    vision_prefixes: tuple[tuple[str, str], ...] = ()
    """Prefixes of names in our vision tower, each with that of the tensors on disk."""
    is_vision_read: bool = False
    """Whether the vision tower's tensors are part of the model (`model.vision`); otherwise they are copied."""

    @property
    def carried(self) -> tuple[str, ...]:
        """Patterns of all tensors that conversions copy without reading them."""
        ahead = (f"{re.escape(self.ahead)}.+",) if self.ahead and not self.is_ahead_read else ()
        images = () if self.tower is None or self.is_vision_read else self.tower.images
        return (*images, *self.carried_names, *ahead)

    def with_vision(self, model: ModelSection, config: Mapping[str, Any]) -> tuple[Family, ModelSection]:
        """Returns family and model with the vision tower of a config.json.

        Raises:
            DataError: This family's tower cannot be trained.
        """
        family = self.for_vision(True)
        assert family.tower is not None, "for_vision refuses others"
        assert family.tower.trained is not None, "for_vision refuses others"
        vision = vision_of(config, self.text(dict(config)), family.tower.trained)
        return family, validated(model.model_dump(exclude_defaults=True) | {"vision": vision})

    def for_vision(self, is_read: bool) -> Family:
        """Returns the family for a model with a vision tower, or without one."""
        if not is_read:
            return self
        if self.tower is None or self.tower.trained is None:
            raise DataError(f"model.vision is not supported in a {self.model_type} model; remove it")
        return replace(self, is_vision_read=True)

    def for_depths(self, depths: int) -> Family:
        """Returns the family for a model with this number of MTP depths."""
        if not self.ahead or not depths:
            return self
        if depths > 1:
            raise DataError(
                f"a {self.model_type} model has at most one MTP depth, but mtp_depths={depths}; set it to 0 or 1"
            )
        return replace(self, is_ahead_read=True)

    def with_depths(
        self, model: ModelSection, depths: int, names: Collection[str] | None
    ) -> tuple[Family, ModelSection]:
        """Returns family and model with the requested MTP depths, if the folder has them or `names` is None."""
        layers = f"{self.ahead}layers."
        ahead = [name for name in names or () if self.ahead and name.startswith(layers)]
        numbers = {name.removeprefix(layers).split(".")[0] for name in ahead}
        num_depths = depths if names is None and self.ahead else len(numbers)
        if not depths or not num_depths:
            return self, model
        content = model.model_dump(exclude_defaults=True) | {"mtp_depths": num_depths}
        return self.for_depths(num_depths), validated(content)

    def carries(self, name: str) -> bool:
        """Returns whether conversions copy a tensor without reading it."""
        return any(re.fullmatch(pattern, name) for pattern in self.carried)

    def parts(self, config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], frozenset[str]]]:
        """Yields each part of a config.json as (prefix of its field names, fields, known names)."""
        if self.tower is None:
            yield "", config, self.names
        else:
            yield "", config, self.tower.names
            yield f"{TEXT}.", self.tower.nested(config), self.names

    def text(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields that describe the text model."""
        return config if self.tower is None else self.tower.text(config)

    @property
    def names(self) -> frozenset[str]:
        """The fields of config.json that have a known meaning in this family."""
        return frozenset(self.inert).union(*(entry.names for entry in self.entries))

    def as_held(self, config: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
        """Returns the config.json that describes a folder's tensors, which may lack MTP depths, or have a head despite
        tied tables; unchanged if `names` is None."""
        result = config if self.tower is None else self.tower.as_held(config, names)
        if names is None:
            return result
        text = result if self.tower is None else self.tower.nested(result)
        base = (BASE, "") if self.tower is None else self.tower.beginnings(names)[:1]
        layer = f"layers.{self.text(result).get('num_hidden_layers')}."
        # transformers saves the field without the weights
        if text.get(DEPTHS) and not any(name.startswith(tuple(start + layer for start in base)) for name in names):
            without_depths = {**text, DEPTHS: 0}
            return without_depths if self.tower is None else {**result, TEXT: without_depths}
        return result

    def as_stored(self, names: Collection[str], for_all_versions: bool = False) -> Family:
        """Returns the family with the tensor names of a folder.

        Weights saved from a base model lack `model.`, and those of a multimodal model have two prefixes. transformers
        5, but not 4, reads and writes the experts of a layer as one tensor.

        Args:
            names: Names of all tensors; empty for the usual names.
            for_all_versions: Whether to use only names that transformers 4 can read.
        """
        # like the patterns, with {L} instead of numbers
        patterns = {_NUMBER.sub("{L}", name) for name in names}
        has_base = any(name.startswith(BASE) for name in patterns)
        base, outside = "" if not has_base and any(name.startswith(_IN_BASE) for name in patterns) else BASE, ""
        if self.tower is not None:
            base, outside = self.tower.beginnings(names)
        rules = []
        for rule in self.rules:
            usual, *alternatives = [self._under(base, outside, parts) for parts in (rule.parts, *rule.alternatives)]
            choices = [usual, *(() if for_all_versions else alternatives)]
            fitting = (parts for parts in choices if any(part.name.replace("{E}", "{L}") in patterns for part in parts))
            rules.append(replace(rule, parts=next(fitting, usual), alternatives=tuple(alternatives)))
        prefixes = () if self.tower is None else self.tower.vision_prefixes(names)
        return replace(self, rules=tuple(rules), base=base, outside=outside, vision_prefixes=prefixes)

    def _under(self, base: str, outside: str, parts: tuple[TensorPattern, ...]) -> tuple[TensorPattern, ...]:
        def renamed(name: str) -> str:
            in_base = name.startswith(self.base)
            return base + name.removeprefix(self.base) if in_base else outside + name.removeprefix(self.outside)

        return tuple(replace(part, name=renamed(part.name)) for part in parts)

    def model(self, config: dict[str, Any]) -> ModelSection:
        """Builds the model that a config.json describes; raises DataError if it is not supported."""
        return model_of(self.text(config), self.entries)

    def config(self, model: ModelSection, template: Mapping[str, Any] | None) -> dict[str, Any]:
        """Builds a config.json that describes the model, from the file that came with the weights, or None."""
        start = {"architectures": [self.architecture], "model_type": self.model_type} if template is None else template
        if self.tower is None:
            return config_of(model, self.entries, start, template is not None)
        start = {TEXT: {"model_type": self.tower.text_type}, **start}
        text = self.tower.text(start)
        if template is not None and not model.tied_embeddings and self.tower.may_hold_head(start):
            text[TIED] = False
        # the template's tower is used
        described = model.model_copy(update={"vision": None})
        result = self.tower.with_text(start, text, config_of(described, self.entries, text, template is not None))
        return self.tower.with_inner_tying(result, model.tied_embeddings)

    def for_all_versions(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds older fields to the result of `config`, so that transformers 4 reads it like transformers 5."""
        text = self.text(dict(config))
        result = dict(text)
        for entry in self.entries:
            result |= {name: value for name, value in entry.older(text).items() if name not in text}
        return result if self.tower is None else self.tower.with_outer_tying(self.tower.with_text(config, text, result))

    def table(self, model: ModelSection, stored: Mapping[str, Sizes] = MappingProxyType({})) -> Table:
        """Builds the table of a model's tensors; `stored`: shapes of a folder's tensors, which some families write in
        two ways."""
        # layers of different kinds have different keys, so megatron-core numbers them instead of stacking them
        is_stacked = len(set(kinds(model))) == 1
        table = build_table(self.rules, model, axis_sizes(model), is_stacked, stored)
        table = replace(table, copies=_copies(model, self.base, self.outside))
        return with_tower(table, model, self.vision_prefixes)


def in_tower(family: Family, model_type: str, architecture: str, tower: Tower) -> Family:
    """Builds the family of a multimodal model from its text model's family."""
    named = replace(family, model_type=model_type, architecture=architecture, tower=tower)
    return named.as_stored(())


def axis_sizes(model: ModelSection) -> dict[str, int]:
    """Returns the sizes of the axes in tables: those below, and those of `LayerPart.axes`.

    V vocabulary, h hidden, f feed-forward, H query heads, G query groups, s slots of a group (its queries, key and
    value), Q query heads of a group, d dimensions of a head, c halves of a gated projection, o single row, L layers,
    n labels of a head, j both inputs of an MTP depth.
    """
    shared = model.num_attention_heads // model.query_groups
    sizes = {
        "V": model.vocab_size,
        "n": model.output.head_rows,
        "h": model.hidden_size,
        "f": model.ffn_hidden_size,
        "H": model.num_attention_heads,
        "G": model.query_groups,
        # + 2 for the key and value of each group, as in megatron-core's linear_qkv
        "s": shared * (2 if model.attention_gate else 1) + 2,
        "Q": shared,
        "d": model.head_size,
        "c": 2,
        "o": 1,
        "j": 2 * model.hidden_size,
        "L": model.num_layers,
    }
    for part in present(model):
        sizes |= part.axes(model)
    return sizes


def _copies(model: ModelSection, base: str, outside: str) -> dict[str, str]:
    """Returns copy -> original of vocabulary tables that some folders have twice."""
    embeddings = f"{base}embed_tokens.weight"
    head = f"{outside}lm_head.weight"
    output = embeddings if model.output.is_tied else head
    # some programs save a tied table under both names
    copies = {head: embeddings} if model.output.is_tied else {}
    for layer, _ in enumerate(model.layers_ahead, start=model.num_layers):
        # DeepSeek's files repeat both tables in each MTP layer
        copies[f"{base}layers.{layer}.embed_tokens.weight"] = embeddings
        copies[f"{base}layers.{layer}.shared_head.head.weight"] = output
    return copies
