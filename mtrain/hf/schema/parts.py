"""Parts that a model may lack although its config.json has fields of them."""

from __future__ import annotations

from collections.abc import Mapping

SIZES: Mapping[str, str] = {
    "experts": "experts.num_experts",
    "mla": "mla.kv_lora_rank",
    "delta_net": "delta_net.num_value_heads",
    "mamba": "mamba.num_heads",
    "sliding_window": "sliding_window",
}
"""Part -> our field with its size: absent or 0 in the file, the model has no such part."""


def section_of(dotted: str) -> str | None:
    """Returns the part to which one of our fields belongs, by its section, if any."""
    section, inside, _ = dotted.partition(".")
    return section if inside and section in SIZES else None
