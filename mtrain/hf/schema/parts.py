"""Parts of a model that a config.json may lack although it has fields of them."""

from __future__ import annotations

from collections.abc import Mapping

SIZES: Mapping[str, str] = {
    "experts": "experts.num_experts",
    "mla": "mla.kv_lora_rank",
    "delta_net": "delta_net.num_value_heads",
    "mamba": "mamba.num_heads",
    "sliding_window": "sliding_window",
}
"""Part -> our field with its size: a model has no such part where its file does not give the size, or gives 0."""


def section_of(dotted: str) -> str | None:
    """Returns the part to which one of our fields belongs, by its section; None where it belongs to none."""
    section, inside, _ = dotted.partition(".")
    return section if inside and section in SIZES else None
