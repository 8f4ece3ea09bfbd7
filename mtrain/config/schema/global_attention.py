"""`model.global_attention.*`: heads of the layers that see the whole row, where those with a window have others."""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class GlobalAttentionSection(Section):
    """Heads of the layers without a sliding window, whose values are their keys before norm and rotation, as in
    Gemma 4."""

    head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Number of dimensions of a head."""
    num_query_groups: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Number of key heads."""
