"""Text models inside multimodal models: their part of config.json, and their tensor names."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.base.errors import DataError
from mtrain.config.schema.vision import VISION, TrainedTower
from mtrain.config.towers import TOWERS
from mtrain.hf.schema.values import needed_value, shown, wrong_type

TEXT, TIED = "text_config", "tie_word_embeddings"
CARRIED = (r"(model\.)?(vision_tower|multi_modal_projector)\..+",)
"""Usual patterns of image tensors."""
BASE = "model.language_model."
"""Prefix of transformers 5's names in memory."""
STORED_BASE, STORED = "language_model.model.", "language_model."
"""Prefixes of names on disk, of the base model and of heads."""
_HEAD = "lm_head.weight"


def default_sizes(layers: int, hidden: int, feed_forward: int, heads: int, vocabulary: int) -> dict[str, int]:
    """Returns the default sizes of a text model's transformers class, field -> size."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }


@dataclass(frozen=True)
class Tower:
    """Position of a text model in a multimodal model."""

    text_type: str
    is_tied: bool
    """Whether the text model's class ties embeddings by default."""
    defaults: Mapping[str, Any]
    """Field -> value for required fields that the nested config omits."""
    unread: str
    """Outer fields that only concern images, separated by spaces."""
    images: tuple[str, ...] = CARRIED
    """Patterns of image tensors, which do not affect text."""
    is_tied_outside: bool = True
    """Whether the multimodal model's class ties tables by default."""
    other_types: tuple[str, ...] = ()
    """Other text models in the same multimodal model, which other families read."""
    aliases: tuple[str, ...] = ()
    """Other names of the text model's family, which an export keeps."""
    trained: TrainedTower | None = None
    """How the vision tower is read if it can be trained (`model.vision`); None: it is only copied."""

    @property
    def names(self) -> frozenset[str]:
        """The outer fields that have a known meaning."""
        return frozenset((TEXT, VISION, TIED, *self.unread.split()))

    def nested(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the text model's part of a config.json."""
        text = config.get(TEXT)
        if not isinstance(text, dict):
            raise wrong_type(TEXT, text, "an object")
        if (name := text.get("model_type", self.text_type)) not in (self.text_type, *self.aliases):
            needed = " or ".join((self.text_type, *self.aliases, *self.other_types))
            raise DataError(
                f"config.json: {TEXT} of model_type={shown(name)} is not supported in a {config.get('model_type')} "
                f"model, but {needed} is needed"
            )
        return text

    def type_of(self, config: Mapping[str, Any]) -> object:
        """Returns the text model's type in the file."""
        text = config.get(TEXT)
        return text.get("model_type", self.text_type) if isinstance(text, dict) else self.text_type

    def text(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all fields of the text model, as if it had its own config.json.

        In transformers 5 the outer field, by default true in some models, decides whether tables are tied.
        """
        return {**self.defaults, **self.nested(config), TIED: needed_value(config, TIED, bool, self.is_tied_outside)}

    def may_hold_head(self, config: Mapping[str, Any]) -> bool:
        """Returns whether a head on disk is a separate table, even if the outer field or its default is true.

        transformers 5 writes the outer field for models published without it, but keeps the head and logs that;
        transformers 4 reads the nested field.
        """
        return not self._is_tied_inside(config)

    def as_held(self, config: dict[str, Any], names: Collection[str] | None) -> dict[str, Any]:
        """Returns the config.json that describes a folder's tensors.

        Args:
            names: Names of the folder's tensors; if None, a missing outer field means that the nested one decides, as
                in Mistral Small.
        """
        has_head = TIED not in config if names is None else not {_HEAD, STORED + _HEAD}.isdisjoint(names)
        return {**config, TIED: False} if has_head and self.may_hold_head(config) else config

    def with_text(
        self, config: Mapping[str, Any], text: Mapping[str, Any], changed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns a config.json whose text model `text` becomes `changed`; leaves equal fields as they are."""
        result = copy.deepcopy(dict(config))
        changes = {name: value for name, value in changed.items() if name not in text or text[name] != value}
        if TIED in changes:
            result[TIED] = changes.pop(TIED)
        result[TEXT] = {**result[TEXT], **changes}
        return result

    def with_inner_tying(self, config: dict[str, Any], is_tied: bool) -> dict[str, Any]:
        """Sets the nested field for tied tables, for transformers 4 and for programs that open only the text model."""
        text = config[TEXT]
        return config if self._is_tied_inside(config) == is_tied else {**config, TEXT: {**text, TIED: is_tied}}

    def with_outer_tying(self, config: dict[str, Any]) -> dict[str, Any]:
        """Copies the nested field for tied tables to the outer one; without it, transformers 5 reads a model with a
        head on disk the same."""
        is_tied = self._is_tied_inside(config)
        return (
            config if needed_value(config, TIED, bool, self.is_tied_outside) == is_tied else {**config, TIED: is_tied}
        )

    def _is_tied_inside(self, config: Mapping[str, Any]) -> bool:
        return needed_value(self.nested(config), TIED, bool, self.is_tied)

    def vision_prefixes(self, names: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Returns the prefixes of names in our vision tower, each with that of a folder's tensor names; the usual ones
        if the folder has no tensor of the tower, none for a tower that is only copied."""
        return tuple(
            (ours, next((theirs for theirs in choices if any(name.startswith(theirs) for name in names)), choices[0]))
            for ours, choices in self._prefixes()
        )

    def vision_path(self, name: str) -> str:
        """Returns the path in transformers' model of a tensor of our vision tower."""
        return next(theirs[-1] + name.removeprefix(ours) for ours, theirs in self._prefixes() if name.startswith(ours))

    def _prefixes(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return () if self.trained is None else TOWERS[self.trained.kind].prefixes

    def beginnings(self, names: Collection[str]) -> tuple[str, str]:
        """Returns the prefixes of a folder's tensor names, of the base model and of heads."""
        is_stored = any(name.startswith(STORED) for name in names)
        return (STORED_BASE, STORED) if is_stored else (BASE, "")
