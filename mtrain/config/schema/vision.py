"""`model.vision.*`: the vision tower of a model that is trained with images."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section


class VisionSection(Section):
    """Vision tower of Qwen3-VL and Qwen3.5, which turns patches of images into features that replace embeddings of
    tokens, and its projector, which merges features of neighbouring patches. Both are modules of transformers."""

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
    """Number of rows in the table of positions, a square grid that is interpolated for each image."""
    activation: Literal["gelu", "gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    """Activation of the tower's feed-forward part."""
    rope_sections: tuple[int, int, int]
    """Numbers of pairs of a head in the language model that rotate with time, height and width; the axes alternate."""
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
        if self.hidden_size % (4 * self.num_attention_heads):
            yield (
                f"hidden_size={self.hidden_size} must be a multiple of 4 x num_attention_heads="
                f"{self.num_attention_heads}, since rows and columns each rotate pairs of a head; change one of them"
            )
        side = round(self.num_positions**0.5)
        if side**2 != self.num_positions:
            yield f"num_positions={self.num_positions} must be a square number, since the grid is square; change it"
        if list(self.deepstack) != sorted({*self.deepstack} & {*range(self.num_layers)}):
            yield (
                f"deepstack={list(self.deepstack)} must be ascending numbers of layers of the tower, from 0 to "
                f"{self.num_layers - 1}; change it"
            )
        if min(self.rope_sections) < 0:
            yield f"rope_sections={list(self.rope_sections)} must be at least 0; change them"
