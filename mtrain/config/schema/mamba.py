"""`model.mamba.*`: Mamba-2, and the rules of the pattern of its layers."""

from collections.abc import Iterable, Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.experts import ExpertsSection
from mtrain.config.schema.section import Section, rule

_LETTERS = "M*-E"
OF_TWO_SUBLAYERS = ("mla", "delta_net", "sliding_window", "sandwich_norm", "post_norm", "mtp_depths")
"""Keys of `model.*` that layers of one sublayer do not have."""


class MambaSection(Section):
    """Layers with a state of fixed size, which each token decays and adds to.

    Source: Mamba-2, arXiv 2405.21060; Nemotron-H, as Hugging Face transformers computes it.
    """

    projections: ClassVar[frozenset[str]] = frozenset(("in_proj_zxbcdt", "in_proj", "out_proj"))
    """Names in adapter.targets of its projections."""
    num_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Heads, each with its own state; a multiple of num_groups."""
    head_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of a head."""
    num_groups: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Groups of heads, which share what a token writes (B) and reads (C), and a norm of their output. layout.tp must
    divide it."""
    state_dim: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Dimensions of B and C; a head's state is state_dim x head_dim."""
    conv_kernel: Annotated[int, bounds.WIDTH] = Field(4, gt=1)
    """Tokens that the causal convolution of inputs, B and C sees, including the current one."""
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

    @rule
    def groups_divide_the_heads(self) -> str | None:
        if self.num_heads % self.num_groups == 0:
            return None
        return f"num_groups={self.num_groups} must divide num_heads={self.num_heads}; change one of them"


def broken_rules_of_pattern(
    pattern: str | None,
    num_layers: int,
    mamba: MambaSection | None,
    experts: ExpertsSection | None,
    others: Iterable[str],
) -> Iterator[str]:
    """Yields a message for everything that a pattern of sublayers contradicts.

    Args:
        others: Keys of OF_TWO_SUBLAYERS that are given.
    """
    if pattern is None:
        if mamba is not None:
            yield "mamba needs layer_pattern, which says in which layers it is; set it"
        return
    given = f"layer_pattern={pattern}"
    if unknown := sorted(set(pattern) - set(_LETTERS)):
        yield f"{given} knows the letters {', '.join(_LETTERS)}, but has {', '.join(unknown)}; change it"
    if len(pattern) != num_layers:
        yield f"{given} has {len(pattern)} letters for num_layers={num_layers}; change one of them"
    for letter, key, is_set in (("M", "mamba", mamba is not None), ("E", "experts", experts is not None)):
        if letter in pattern and not is_set:
            yield f"{given} has a layer {letter}, which needs model.{key}; set it, or change the pattern"
        elif letter not in pattern and is_set:
            yield f"{given} has no layer {letter} for model.{key}; remove it, or change the pattern"
    if experts is not None and (experts.first_dense_layers or experts.every != 1):
        yield f"{given} says which layers have experts; remove experts.first_dense_layers and experts.every"
    for key in others:
        yield f"{given} cannot be combined with model.{key} (its layers have one sublayer each); remove one of them"
