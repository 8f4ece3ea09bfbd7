"""`model.vision.*`: the vision tower of a model that is trained with images."""

from collections.abc import Iterator
from math import isqrt
from typing import Annotated, Literal, assert_never

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section

TowerKind = Literal["qwen3_vl", "gemma3", "mistral3"]


class VisionSection(Section):
    """Vision tower, which turns patches of images into features that replace embeddings of tokens, and its projector,
    which merges features of neighbouring patches. Both are modules of transformers."""

    kind: TowerKind = "qwen3_vl"
    """Tower and projector. qwen3_vl: those of Qwen3-VL and Qwen3.5, for images of any size; tokens have positions of
    time, height and width. gemma3: SigLIP and averages of patches, for images of one size, whose tokens see each other
    both ways. mistral3: Pixtral and the projector of Mistral 3, for images of any size; tokens count like text."""
    num_layers: Annotated[int, bounds.LAYERS] = Field(gt=0)
    """Number of layers of the tower."""
    hidden_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Width of the tower's residual stream."""
    ffn_hidden_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Width of the tower's feed-forward part between its projections."""
    num_attention_heads: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Number of heads of the tower."""
    num_channels: Annotated[int, bounds.WIDTH] = Field(3, gt=0)
    """Number of channels of a pixel."""
    patch_size: Annotated[int, bounds.WIDTH] = Field(gt=0)
    """Rows and columns of a patch, in pixels."""
    frames_per_patch: Annotated[int, bounds.WIDTH] = Field(2, gt=0)
    """Number of frames in a patch; an image fills them with copies."""
    merge_size: Annotated[int, bounds.WIDTH] = Field(2, gt=0)
    """Number m: m x m neighbouring patches become one feature."""
    num_positions: Annotated[int, bounds.POSITIONS] = Field(gt=0)
    """Number of rows in the table of positions, a square grid. qwen3_vl interpolates it for each image; gemma3 resizes
    each image to it; mistral3 has no table, hence 1."""
    activation: Literal["gelu", "gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    """Activation of the tower's feed-forward part."""
    rope_sections: tuple[int, int, int] | None = None
    """Numbers of pairs of a head in the language model that rotate with time, height and width; the axes alternate.
    null, for gemma3 and mistral3: an image's tokens count like text."""
    deepstack: tuple[int, ...] = ()
    """Layers of the tower, counted from 0 and ascending, whose merged outputs are added to the hidden states of image
    tokens after the first layers of the language model, one after each (DeepStack); empty: none."""
    image_token: int = Field(ge=0)
    """Id of the token whose embedding is replaced by a feature."""
    freeze_tower: bool = True
    """Whether the tower keeps its weights (freeze_vit, freeze_vision_tower)."""
    freeze_projector: bool = True
    """Whether the projector keeps its weights (freeze_aligner, freeze_multi_modal_projector)."""
    freeze_language_model: bool = False
    """Whether the language model keeps its weights, with its embeddings and output layer (freeze_llm,
    freeze_language_model); then the tower, the projector or adapters must be trained."""

    @property
    def bidirectional(self) -> bool:
        """Whether tokens of an image see each other both ways, in all layers."""
        return self.kind == "gemma3"

    @property
    def fixed_side(self) -> int | None:
        """Rows and columns of every image, in patches; None if sizes differ."""
        return isqrt(self.num_positions) if self.kind == "gemma3" else None

    @property
    def patches_per_feature(self) -> int:
        """Number of patches that become one feature."""
        return self.merge_size**2

    @property
    def patch_elements(self) -> int:
        """Numbers in a flattened patch."""
        return self.num_channels * self.frames_per_patch * self.patch_size**2

    @property
    def is_frozen(self) -> bool:
        """Whether neither the tower nor the projector is trained."""
        return self.freeze_tower and self.freeze_projector

    def broken_rules(self) -> Iterator[str]:
        match self.kind:
            case "qwen3_vl":
                yield from self._broken_rules_of_qwen()
            case "gemma3":
                yield from self._broken_rules_of_gemma()
            case "mistral3":
                yield from self._broken_rules_of_mistral()
            case _:
                assert_never(self.kind)
        side = round(self.num_positions**0.5)
        if side**2 != self.num_positions:
            yield f"num_positions={self.num_positions} must be a square number, since the grid is square; change it"
        if list(self.deepstack) != sorted({*self.deepstack} & {*range(self.num_layers)}):
            yield (
                f"deepstack={list(self.deepstack)} must be ascending numbers of layers of the tower, from 0 to "
                f"{self.num_layers - 1}; change it"
            )

    def _broken_rules_of_qwen(self) -> Iterator[str]:
        yield from self._uneven_heads()
        if self.rope_sections is None:
            yield "rope_sections is missing; give the numbers of pairs for time, height and width"
        elif min(self.rope_sections) < 0:
            yield f"rope_sections={list(self.rope_sections)} must be at least 0; change them"

    def _uneven_heads(self) -> Iterator[str]:
        if self.hidden_size % (4 * self.num_attention_heads):
            yield (
                f"hidden_size={self.hidden_size} must be a multiple of 4 x num_attention_heads="
                f"{self.num_attention_heads}, since rows and columns each rotate pairs of a head; change one of them"
            )

    def _without_axes(self) -> Iterator[str]:
        if self.frames_per_patch != 1:
            yield f"frames_per_patch={self.frames_per_patch} must be 1 for kind={self.kind}; change it"
        for name, value in {"rope_sections": self.rope_sections, "deepstack": self.deepstack}.items():
            if value:
                yield f"{name}={list(value)} has no meaning for kind={self.kind}; remove it"

    def _broken_rules_of_mistral(self) -> Iterator[str]:
        yield from self._uneven_heads()
        yield from self._without_axes()
        if self.num_positions != 1:
            yield f"num_positions={self.num_positions} must be 1 for kind=mistral3, which has no table; change it"

    def _broken_rules_of_gemma(self) -> Iterator[str]:
        yield from self._without_axes()
        if self.hidden_size % self.num_attention_heads:
            yield (
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}; "
                "change one of them"
            )
        if isqrt(self.num_positions) % self.merge_size:
            yield (
                f"merge_size={self.merge_size} must divide the {isqrt(self.num_positions)} rows of num_positions="
                f"{self.num_positions}; change one of them"
            )
