"""OLMo-2 and OLMo-3: norms after attention and the feed-forward part, and over whole queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Required, Rope, heads
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    VOCABULARY,
    ListedWindows,
    common,
    in_layer,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.rope import ROPE_NAMES, older_rope, read_rope, written_rope

_WIDE, _WINDOWED = "full_attention", "sliding_attention"
_BASE = 500000.0
_WINDOWS = ListedWindows(every=4, window=4096)


@final
@dataclass(frozen=True)
class _OlmoRopes(Entry):
    """Rotary embeddings of both kinds of layer; only that of layers without a window may be scaled."""

    @property
    def names(self) -> tuple[str, ...]:
        return ROPE_NAMES

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        said = config.get("rope_parameters")
        if said is not None and not (isinstance(said, dict) and said.keys() <= {_WIDE, _WINDOWED}):
            raise DataError(
                f"config.json: rope_parameters must have {_WIDE} and {_WINDOWED} with an object each; correct the file"
            )
        if said is None and "rope_theta" not in config:
            raise DataError(
                f"config.json: neither rope_theta nor rope_parameters is given: transformers 4 then takes 10000, and "
                f"transformers 5 {_BASE:g}; add the one that the model was trained with"
            )
        has_windows = _WINDOWS.read(config)["sliding_window"] is not None
        wide = read_rope({**config, "rope_parameters": None if said is None else said.get(_WIDE)}, _BASE, by_kind=True)
        found = {f"rope.{name}": value for name, value in wide.items()}
        return found | {"rope.local_base": self._local_base(config, said)} if has_windows else found

    @staticmethod
    def _local_base(config: dict[str, Any], said: dict[str, Any] | None) -> float:
        local = read_rope({"rope_parameters": None if said is None else said.get(_WINDOWED)}, _BASE)
        if local["scaling"] != "none":
            raise DataError(f"config.json: rope_type={local['scaling']} of windowed layers must be default")
        if config.get("rope_theta", local["base"]) != local["base"]:
            # transformers 4 rotated windowed layers by it, transformers 5 rotates them by its default
            raise DataError(
                f"config.json: rope_theta={config['rope_theta']} does not say whether windowed layers turn by it or by "
                f"{local['base']:g}; give rope_parameters with {_WIDE} and {_WINDOWED} in its place"
            )
        base: float = local["base"]
        return base

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        base = model.rope.base if model.rope.local_base is None else model.rope.local_base
        # The old style has one theta, which two versions of transformers apply to windowed layers differently: only the
        # default is unambiguous.
        if "rope_theta" in config and "rope_parameters" not in config and base == model.rope.base == _BASE:
            return written_rope(config, model.rope)
        wide = written_rope({}, model.rope)["rope_parameters"]
        return {"rope_parameters": {_WIDE: wide, _WINDOWED: {"rope_theta": base, "rope_type": "default"}}}

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        said = config.get("rope_parameters") or {}
        used = said.values() if _WINDOWS.read(config)["sliding_window"] is not None else [said.get(_WIDE)]
        bases = {one["rope_theta"] for one in used if one and "rope_theta" in one}
        # transformers 4 has one base for all layers
        return older_rope(said.get(_WIDE), by_kind=True) if len(bases) < 2 else {}


_ENTRIES = (
    *common(norm_epsilon=1e-5),
    *ACTIVATION,
    *heads(),
    Required("attention_bias", False, False),
    # no norm before attention and feed-forward, one after each
    Constant("post_norm", True),
    Constant("qk_norm", True),
    Constant("qk_norm_width", "full"),
)
_RULES = (
    *VOCABULARY,
    in_layer("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight", "h"),
    in_layer("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight", "h"),
    *ATTENTION,
    *FEED_FORWARD,
)

# transformers 4 accepts exactly `type` and `factor` there, for linear scaling, and refuses all others
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", (*_ENTRIES, Rope(older_type="type")), _RULES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", (*_ENTRIES, _WINDOWS, _OlmoRopes()), _RULES)
