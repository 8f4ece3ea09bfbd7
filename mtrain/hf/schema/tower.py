"""A text model inside a multimodal model: its part of config.json, and the names of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.base.errors import DataError
from mtrain.hf.schema.values import needed_value, shown, wrong_type

TEXT, TIED = "text_config", "tie_word_embeddings"
_VISION = "vision_config"
CARRIED = (r"(model\.)?(vision_tower|multi_modal_projector)\..+",)
"""Usual names of tensors of images."""
BASE = "model.language_model."
"""Beginning of names as transformers 5 has them in memory."""
STORED_BASE, STORED = "language_model.model.", "language_model."
"""Beginnings of names as they are published and as transformers writes them: of the base model, and of heads."""
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Tower:
    """Place of a text model in a multimodal one."""

    text_type: str
    """Name of the text model's family."""
    is_tied: bool
    """Whether the class of the text model has tied embeddings where its config says nothing."""
    defaults: Mapping[str, Any]
    """Values of fields that text models of the family must have, where the nested config leaves them out."""
    unread: tuple[str, ...]
    """Outer fields that concern images alone."""
    images: tuple[str, ...] = CARRIED
    """Patterns of tensors of images, which take no part in text."""
    is_tied_outside: bool = True
    """Whether the class of the multimodal model ties its tables where the outer config says nothing."""
    other_types: tuple[str, ...] = ()
    """Names of text models that other families read in the same multimodal one."""
    aliases: tuple[str, ...] = ()
    """Other names of the text model's family, which a file keeps."""

    @property
    def names(self) -> frozenset[str]:
        """Returns the outer fields whose meaning is known."""
        return frozenset((TEXT, _VISION, TIED, *self.unread))

    def nested(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the text model's part of a config.json.

        Raises:
            DataError: There is none, or it is of another family.
        """
        found = config.get(TEXT)
        if not isinstance(found, dict):
            raise wrong_type(TEXT, found, "an object")
        if (name := found.get("model_type", self.text_type)) not in (self.text_type, *self.aliases):
            needed = " or ".join((self.text_type, *self.aliases, *self.other_types))
            raise DataError(
                f"config.json: {TEXT} of model_type={shown(name)} is not supported in a {config.get('model_type')} "
                f"model, but {needed} is needed"
            )
        return found

    def type_of(self, config: Mapping[str, Any]) -> object:
        """Returns the name of the text model's family in the file."""
        found = config.get(TEXT)
        return found.get("model_type", self.text_type) if isinstance(found, dict) else self.text_type

    def text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all fields of the text model, as in a config.json of its own.

        transformers 5 ties the tables of a multimodal model where the outer field says so, some by default.
        """
        return {**self.defaults, **self.nested(config), TIED: needed_value(config, TIED, bool, self.is_tied_outside)}

    def may_hold_head(self, config: Mapping[str, Any]) -> bool:
        """Says whether a stored head is a table of its own, although the outer field, or its default, is true.

        transformers 5 writes that field so for models that were published without it, keeps the stored head and says
        so; transformers 4 reads the nested field.
        """
        return not self._is_tied_inside(config)

    def as_held(self, config: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
        """Returns the config.json of what a folder holds.

        Where nobody knows that, there is a head if the nested field alone says so: as Mistral Small is published.
        """
        has_head = TIED not in config if names is None else not {_HEAD, STORED + _HEAD}.isdisjoint(names)
        return {**config, TIED: False} if has_head and self.may_hold_head(config) else config

    def with_text(
        self, config: Mapping[str, Any], text: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns a config.json with another text model.

        Args:
            config: Content of the file.
            text: Fields of its text model, from `text`.
            changed: Fields of the other one; those that are equal stay as the file has them, or left out.
        """
        found = copy.deepcopy(dict(config))
        changes = {name: value for name, value in changed.items() if name not in text or text[name] != value}
        if TIED in changes:
            found[TIED] = changes.pop(TIED)
        found[TEXT] = {**found[TEXT], **changes}
        return found

    def saying_inside(self, config: dict[str, Any], is_tied: bool) -> dict[str, Any]:
        """Returns a config.json whose nested field says whether tables are tied: transformers 4 reads that one, and so
        does every program that opens the text model alone."""
        text = config[TEXT]
        return config if self._is_tied_inside(config) == is_tied else {**config, TEXT: {**text, TIED: is_tied}}

    def saying_outside(self, config: dict[str, Any]) -> dict[str, Any]:
        """Returns a config.json whose outer field says what the nested one says; where a head is stored, transformers 5
        reads the model alike without it."""
        is_tied = self._is_tied_inside(config)
        return (
            config if needed_value(config, TIED, bool, self.is_tied_outside) == is_tied else {**config, TIED: is_tied}
        )

    def _is_tied_inside(self, config: Mapping[str, Any]) -> bool:
        return needed_value(self.nested(config), TIED, bool, self.is_tied)

    def beginnings(self, names: Collection[str]) -> tuple[str, str]:
        """Returns the beginnings of the names in a folder: of the base model's tensors, and of heads."""
        is_stored = any(name.startswith(STORED) for name in names)
        return (STORED_BASE, STORED) if is_stored else (BASE, "")
