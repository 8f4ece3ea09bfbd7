"""`model.delta_net.*`: layers with a gated delta net instead of attention."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.adapter import DELTA_NET_PARTS
from mtrain.config.schema.section import Section


class DeltaNetSection(Section):
    """Layers with a state of fixed size instead of keys and values; each token decays and corrects the state. The other
    layers have attention.

    Source: Gated Delta Networks, arXiv 2412.06464; Qwen3-Next, as Hugging Face transformers computes it.
    """

    projections: ClassVar[frozenset[str]] = frozenset(
        (*DELTA_NET_PARTS, "in_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
    )
    """Names of its projections in adapter.targets."""
    size: ClassVar[str] = "num_value_heads"
    """Key that every model with such layers sets."""
    num_key_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Query and key heads."""
    num_value_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Value heads, each with its own state; a multiple of num_key_heads."""
    key_head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a query or key head."""
    value_head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a value head."""
    conv_kernel: Annotated[int, bounds.WIDTH] = Field(4, gt=1)
    """Number of tokens that the causal convolution of queries, keys and values covers, including the current one."""
    full_attention_every: Annotated[int, bounds.LAYERS] = Field(4, gt=1)
    """Interval n of the attention layers (layers n, 2n, ...); all others have a delta net."""

    @property
    def key_width(self) -> int:
        """Dimensions of all key heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Dimensions of all value heads together."""
        return self.num_value_heads * self.value_head_dim

    def is_in(self, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has a delta net."""
        return (layer + 1) % self.full_attention_every != 0

    def broken_rules(self) -> Iterator[str]:
        if self.num_value_heads % self.num_key_heads:
            yield (
                f"num_key_heads={self.num_key_heads} must divide num_value_heads={self.num_value_heads}; change one of "
                "them"
            )
