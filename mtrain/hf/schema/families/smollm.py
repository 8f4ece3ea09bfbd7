"""SmolLM3: Llama without rotary positions in every n-th layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.config.schema.model import ModelSection
from mtrain.hf.schema.config import Entry, Rope, heads, skipped_rotations
from mtrain.hf.schema.families.common import (
    ACTIVATION,
    ATTENTION,
    FEED_FORWARD,
    MAX_LISTED_LAYERS,
    NORMS,
    VOCABULARY,
    common,
    kinds_of,
    layer_kinds,
    windows,
)
from mtrain.hf.schema.families.dense import LlamaBiases
from mtrain.hf.schema.family import Family
from mtrain.hf.schema.values import needed_value, shown, value_of

_LISTED, _INTERVAL = "no_rope_layers", "no_rope_layer_interval"


def _rotates(config: dict[str, Any]) -> list[int]:
    """Returns 1 for each layer with rotary positions, else 0."""
    num_layers, every = needed_value(config, "num_hidden_layers", int), needed_value(config, _INTERVAL, int, 4)
    found = config.get(_LISTED)
    if found is None and every > 0 and num_layers <= MAX_LISTED_LAYERS:
        return [int((layer + 1) % every != 0) for layer in range(num_layers)]
    # type: true is not a number here
    if (
        not isinstance(found, list)
        or len(found) != num_layers
        or any(type(one) is not int or one not in (0, 1) for one in found)
    ):
        raise DataError(
            f"config.json: {_LISTED}={shown(found)} must list 1, or 0 for no rotary positions, for each of "
            f"num_hidden_layers={num_layers} layers, or {_INTERVAL}={every} be above 0; correct the file"
        )
    return found


@final
@dataclass(frozen=True)
class _Unrotated(Entry):
    """Layers without rotary positions: one number per layer, or their distance."""

    @property
    def names(self) -> tuple[str, ...]:
        return (_LISTED, _INTERVAL)

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        skipped = [1 - one for one in _rotates(config)]
        # as the number of every n-th layer where it is one: model.* is read by people
        every = skipped.index(1) + 1 if 1 in skipped else 0
        is_regular = (
            every and len(skipped) % every == 0 and skipped == ([0] * (every - 1) + [1]) * (len(skipped) // every)
        )
        return {"megatron.no_rope_freq": (every if is_regular else skipped) if every else None}

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        return {_LISTED: [1 - one for one in skipped_rotations(model)]}

    def agrees(self, config: dict[str, Any], model: ModelSection) -> bool:
        return [1 - one for one in _rotates(config)] == skipped_rotations(model)


@final
@dataclass(frozen=True)
class _Windows(Entry):
    """Layers with a sliding window: one word per layer; else those without rotary positions."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("use_sliding_window", "sliding_window", "layer_types")

    @property
    def part(self) -> str:
        return "sliding_window"

    def read(self, config: dict[str, Any]) -> dict[str, Any]:
        window = value_of(config, "sliding_window", int, None)
        window = window if needed_value(config, "use_sliding_window", bool, False) else None
        rotates = _rotates(config)
        kinds = layer_kinds(config, lambda layer: window is None or rotates[layer - 1] == 1)
        return windows(kinds, window, "use_sliding_window is false or sliding_window null")

    def write(self, config: dict[str, Any], model: ModelSection) -> dict[str, Any]:
        window = model.sliding_window
        return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds_of(model)}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        *common(tied=True),
        *ACTIVATION,
        *heads(groups=4),
        LlamaBiases(),
        _Unrotated(),
        _Windows(),
        Rope(2000000.0),
    ),
    (*VOCABULARY, *NORMS, *ATTENTION, *FEED_FORWARD),
)
