"""OLMo 2 and OLMo 3: norms after attention and the feed-forward part, and over whole queries and keys."""

from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Constant, Entry, Required, Rope, heads
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    VOCABULARY,
    WIDE,
    WINDOWED,
    Windows,
    common,
    every_nth,
    in_layer,
    local_base,
    parameters_by_kind,
    written_by_kind,
)
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.rope import ROPE_NAMES, older_rope, read_rope, written_rope

_BASE = 500000.0
_WINDOWS = Windows(4096, every_nth(4), has_switch=False)


@final
class _OlmoRopes(Entry):
    """Rotary embeddings of both kinds of layer; only the one of layers without a window may be scaled."""

    names = ROPE_NAMES

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        by_kind = parameters_by_kind(config)
        if by_kind is None and "rope_theta" not in config:
            raise DataError(
                "config.json: rope_theta and rope_parameters are missing, for which transformers 4 uses a base of "
                f"10000, and transformers 5 {_BASE:g}; add the base that the model was trained with"
            )
        has_windows = _WINDOWS.read(config)["sliding_window"] is not None
        wide = read_rope(
            {**config, "rope_parameters": None if by_kind is None else by_kind.get(WIDE)}, _BASE, by_kind=True
        )
        fields = {f"rope.{name}": value for name, value in wide.items()}
        return fields | {"rope.local_base": self._local_base(config, by_kind)} if has_windows else fields

    @staticmethod
    def _local_base(config: dict[str, Any], by_kind: dict[str, Any] | None) -> float:
        local = local_base({"rope_parameters": None if by_kind is None else by_kind.get(WINDOWED)}, _BASE)
        if config.get("rope_theta", local) != local:
            # windowed layers use rope_theta in transformers 4, and the default in transformers 5
            raise DataError(
                f"config.json: rope_theta={config['rope_theta']} does not tell whether windowed layers use it or "
                f"{local:g}; set rope_parameters with {WIDE} and {WINDOWED} instead"
            )
        return local

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        base = model.rope.base if model.rope.local_base is None else model.rope.local_base
        # the old style has one theta, which versions of transformers apply to windowed layers differently, so only the
        # default is unambiguous
        if "rope_theta" in config and "rope_parameters" not in config and base == model.rope.base == _BASE:
            return written_rope(config, model.rope)
        return written_by_kind(model.rope)

    def older(self, config: dict[str, Any]) -> dict[str, Any]:
        by_kind = config.get("rope_parameters") or {}
        used = by_kind.values() if _WINDOWS.read(config)["sliding_window"] is not None else [by_kind.get(WIDE)]
        bases = {parameters["rope_theta"] for parameters in used if parameters and "rope_theta" in parameters}
        # transformers 4 has one base for all layers
        return older_rope(by_kind.get(WIDE), by_kind=True) if len(bases) < 2 else {}


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

# for linear scaling, transformers 4 accepts exactly `type` and `factor`
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", (*_ENTRIES, Rope(older_type="type")), _RULES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", (*_ENTRIES, _WINDOWS, _OlmoRopes()), _RULES)
FAMILIES = (OLMO2, OLMO3)
