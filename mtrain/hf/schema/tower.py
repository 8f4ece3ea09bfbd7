"""A text model inside a multimodal model: its part of config.json, and its tensor names."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.base.errors import DataError
from mtrain.hf.schema.values import needed_value, shown, wrong_type

TEXT, TIED = "text_config", "tie_word_embeddings"
_VISION = "vision_config"
CARRIED = (r"(model\.)?(vision_tower|multi_modal_projector)\..+",)
"""Usual tensor names of images."""
BASE = "model.language_model."
"""Beginning of names in memory of transformers 5."""
STORED_BASE, STORED = "language_model.model.", "language_model."
"""Beginnings of published and written names: of the base model, and of heads."""
_HEAD = "lm_head.weight"


def default_sizes(layers: int, hidden: int, feed_forward: int, heads: int, vocabulary: int) -> dict[str, int]:
    """Returns the sizes of a text model that its class in transformers has by default."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }


@dataclass(frozen=True)
class Tower:
    """Position of a text model in a multimodal one."""

    text_type: str
    is_tied: bool
    """Whether the text model's class ties embeddings by default."""
    defaults: Mapping[str, Any]
    """Required values of text models of the family, if the nested config omits them."""
    unread: str
    """Outer fields that concern images alone, separated by spaces."""
    images: tuple[str, ...] = CARRIED
    """Patterns of image tensors, which take no part in text."""
    is_tied_outside: bool = True
    """Whether the multimodal model's class ties tables by default."""
    other_types: tuple[str, ...] = ()
    """Text models in the same multimodal one that other families read."""
    aliases: tuple[str, ...] = ()
    """Other names of the text model's family, which a file keeps."""

    @property
    def names(self) -> frozenset[str]:
        """Returns the outer fields with a known meaning."""
        return frozenset((TEXT, _VISION, TIED, *self.unread.split()))

    def nested(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the text model's part of a config.json."""
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
        """Returns all fields of the text model, as in its own config.json.

        transformers 5 ties the tables of a multimodal model by the outer field, true by default in some.
        """
        return {**self.defaults, **self.nested(config), TIED: needed_value(config, TIED, bool, self.is_tied_outside)}

    def may_hold_head(self, config: Mapping[str, Any]) -> bool:
        """Says whether a stored head is its own table, although the outer field, or its default, is true.

        transformers 5 writes that field for models published without it, keeps the stored head and reports it;
        transformers 4 reads the nested field.
        """
        return not self._is_tied_inside(config)

    def as_held(self, config: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
        """Returns the config.json of what a folder holds.

        Without known tensor names, a head exists if the nested field says so, as in Mistral Small.
        """
        has_head = TIED not in config if names is None else not {_HEAD, STORED + _HEAD}.isdisjoint(names)
        return {**config, TIED: False} if has_head and self.may_hold_head(config) else config

    def with_text(
        self, config: Mapping[str, Any], text: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns a config.json with the text model `changed` for `text`; equal fields stay as they are, or omitted."""
        found = copy.deepcopy(dict(config))
        changes = {name: value for name, value in changed.items() if name not in text or text[name] != value}
        if TIED in changes:
            found[TIED] = changes.pop(TIED)
        found[TEXT] = {**found[TEXT], **changes}
        return found

    def saying_inside(self, config: dict[str, Any], is_tied: bool) -> dict[str, Any]:
        """Returns a config.json whose nested field says whether tables are tied, for transformers 4 and programs that
        open only the text model."""
        text = config[TEXT]
        return config if self._is_tied_inside(config) == is_tied else {**config, TEXT: {**text, TIED: is_tied}}

    def saying_outside(self, config: dict[str, Any]) -> dict[str, Any]:
        """Copies the nested field for tied tables outside; with a stored head transformers 5 reads the model alike
        without it."""
        is_tied = self._is_tied_inside(config)
        return (
            config if needed_value(config, TIED, bool, self.is_tied_outside) == is_tied else {**config, TIED: is_tied}
        )

    def _is_tied_inside(self, config: Mapping[str, Any]) -> bool:
        return needed_value(self.nested(config), TIED, bool, self.is_tied)

    def beginnings(self, names: Collection[str]) -> tuple[str, str]:
        """Returns the beginnings of a folder's tensor names: of the base model, and of heads."""
        is_stored = any(name.startswith(STORED) for name in names)
        return (STORED_BASE, STORED) if is_stored else (BASE, "")
