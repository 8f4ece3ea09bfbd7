"""`model.mamba.*`: Mamba-2."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class MambaSection(Section):
    """Layers with a state of fixed size; each token decays the state and adds to it.

    Source: Mamba-2, arXiv 2405.21060; Nemotron-H, as Hugging Face transformers computes it.
    """

    projections: ClassVar[frozenset[str]] = frozenset(("in_proj_zxbcdt", "in_proj", "out_proj"))
    """Names of its projections in adapter.targets."""
    size: ClassVar[str] = "num_heads"
    """Key that every model with such layers sets."""
    num_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Heads, each with its own state; a multiple of num_groups."""
    head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a head."""
    num_groups: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Groups of heads; a group's heads share B (what a token writes), C (what it reads) and the norm of their output.
    layout.tp must divide it."""
    state_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of B and C; a head's state is state_dim x head_dim."""
    conv_kernel: Annotated[int, bounds.WIDTH] = Field(4, gt=1)
    """Number of tokens that the causal convolution of inputs, B and C covers, including the current one."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""
    step_min: float = Field(0.0, ge=0)
    """Smallest step: steps are max(step_min, softplus(...)); 0: any step."""

    @property
    def width(self) -> int:
        """Dimensions of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.width + 2 * self.num_groups * self.state_dim

    def broken_rules(self) -> Iterator[str]:
        if self.num_heads % self.num_groups:
            yield f"num_groups={self.num_groups} must divide num_heads={self.num_heads}; change one of them"
