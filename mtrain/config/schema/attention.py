"""`model.mla.*` and `model.global_attention.*`: attention shapes that `model.*` itself cannot describe."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class LatentAttentionSection(Section):
    """Low-rank queries, keys and values; all heads share the rotary part of each key.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_lora_rank: Annotated[int | None, bounds.WIDTH] = Field(None, gt=0)
    """Rank of the queries; null: queries are projected directly."""
    kv_lora_rank: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Shared rank of keys and values."""
    qk_nope_head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a query or key head without a position."""
    qk_rope_head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a query or key head that are rotated."""
    v_head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a value head."""
    norm_epsilon: float | None = Field(None, gt=0)
    """Epsilon of the norms of both latents; null: model.norm_epsilon. DeepSeek's is always 1e-6."""

    @property
    def query_head_dim(self) -> int:
        """Dimensions of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def projections(self) -> frozenset[str]:
        """Projections that produce queries, keys and values, as named in adapter.targets."""
        queries = ("q_proj",) if self.q_lora_rank is None else ("q_a_proj", "q_b_proj")
        return frozenset((*queries, "kv_a_proj", "kv_b_proj"))

    def broken_rules(self) -> Iterator[str]:
        if self.qk_rope_head_dim % 2:
            yield (
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even, since the rotary embedding rotates pairs; "
                "change it"
            )


class GlobalAttentionSection(Section):
    """Heads of layers without a sliding window, whose values are their keys before norm and rotation, as in Gemma 4."""

    head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a head."""
    num_query_groups: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Number of key heads."""
