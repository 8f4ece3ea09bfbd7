"""`model.vision.*`: the vision tower of a model that is trained with images, and what a kind of tower is.

One object of `mtrain/config/towers.py` describes a kind for configuration, planner, conversion, data and verification:
its sizes, its memory, its fields in config.json, and how it reads images. A module of transformers computes it
(`mtrain/core/layers/vision.py`, and the reference of `mtrain verify`). Nothing here loads torch or numpy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from mtrain.base.errors import DataError
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema import bounds
from mtrain.config.schema.section import Section

VISION = "vision_config"
"""Field of config.json that describes the tower."""
TowerKind = Literal["qwen3_vl", "gemma3", "mistral3", "gemma4"]


class VisionSection(Section):
    """Vision tower, which turns patches of images into features that replace embeddings of tokens, and its projector,
    which merges features of neighbouring patches. Both are modules of transformers."""

    kind: TowerKind = "qwen3_vl"
    """Tower and projector. qwen3_vl: those of Qwen3-VL and Qwen3.5, for images of any size; tokens have positions of
    time, height and width. gemma3: SigLIP and averages of patches, for images of one size, whose tokens see each other
    both ways. mistral3: Pixtral and the projector of Mistral 3, for images of any size; tokens count like text. gemma4:
    averages of patches of images of any size, whose tokens see each other both ways in layers with a window."""
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
    each image to it; mistral3 has no table, hence 1; gemma4 has one for rows and one for columns of an image."""
    activation: Literal["gelu", "gelu_pytorch_tanh", "silu"] = "gelu_pytorch_tanh"
    """Activation of the tower's feed-forward part."""
    rope_sections: tuple[int, int, int] | None = None
    """Numbers of pairs of a head in the language model that rotate with time, height and width; the axes alternate.
    null, for all but qwen3_vl: an image's tokens count like text."""
    deepstack: tuple[int, ...] = ()
    """Layers of the tower, counted from 0 and ascending, whose merged outputs are added to the hidden states of image
    tokens after the first layers of the language model, one after each (DeepStack); empty: none."""
    standardize: bool = False
    """Whether the features before the projector are shifted and scaled by fixed numbers (std_bias, std_scale), which
    the folder of the model has and which are never trained; gemma4."""
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


@dataclass(frozen=True)
class Fields:
    """Fields of `vision_config` in config.json."""

    sizes: Mapping[str, tuple[str, int]]
    """Field -> our field, and its default in transformers."""
    neutral: Mapping[str, object]
    """Field -> the only value that is supported, besides null."""
    others: tuple[str, ...]
    """Fields that are read elsewhere, or only initialise a new tower."""
    activation: tuple[str, str] = ("hidden_act", "gelu_pytorch_tanh")
    """Field of the activation, and its default."""


class ConfigJson(NamedTuple):
    """A config.json with a tower."""

    model: Mapping[str, Any]
    """The whole file."""
    tower: Mapping[str, Any]
    """Fields of `vision_config`."""
    text: Mapping[str, Any]
    """Fields of the text model."""
    rope: Mapping[str, Any]
    """Rotary parameters of the text model; empty without any."""
    needed: Callable[..., Any]
    """Reads a field of an object that must not be null, by object, name, type and default; raises DataError."""
    shown: Callable[[object], str]
    """Formats a value for a message."""

    def check_axial_rope(self, base: float) -> None:
        """Refuses other rotary parameters of the tower; transformers reads the type "default" as "axial"."""
        rope, needed = self.tower.get("rope_parameters"), {"rope_type": "axial", "rope_theta": base}
        if rope not in (None, needed, needed | {"rope_type": "default"}):
            raise DataError(
                f"config.json: {VISION}.rope_parameters={self.shown(rope)} is not supported in a vision tower, but "
                f"{self.shown(needed)} is needed"
            )

    def unsupported(self, field: str, value: object, needed: object) -> DataError:
        return DataError(f"config.json: {field}={self.shown(value)} is not supported, but {needed} is needed")


@dataclass(frozen=True)
class TrainedTower:
    """A family's vision tower that can be trained, with the defaults of transformers."""

    types: tuple[str, ...]
    """The tower's model_type in transformers, followed by other names for it."""
    image_token: int
    rope_sections: tuple[int, int, int] | None = None
    """None if tokens of images count like text."""
    kind: TowerKind = "qwen3_vl"
    """Value of `model.vision.kind`."""
    deepstack: tuple[int, ...] | None = None
    """Layers whose outputs are added in the language model; None if the family adds none."""


class ProcessedImage(NamedTuple):
    """What transformers' image processor makes of one image."""

    outputs: Mapping[str, Any]
    """Arrays by name."""
    processor: Any
    source: str
    """Class and folder of the processor, for messages."""
    num_tokens: int
    """Tokens of an image according to processor_config.json, if all images have as many."""


class TowerDescription(ABC):
    """One kind of vision tower with its projector."""

    name: str
    """Model that has it, for messages."""
    fields: Fields
    projector: tuple[str, ...] = ("multi_modal_projector.",)
    """Prefixes of the projector's tensors."""
    prefixes: tuple[tuple[str, tuple[str, ...]], ...]
    """Prefixes of the names of its tensors in our tower, each with those that files have, the usual one first and that
    of transformers 5 in memory last."""
    bidirectional: Literal["all", "windowed"] | None = None
    """Layers in which tokens of an image see each other both ways: all, or those with a window."""
    constants: tuple[str, ...] = ()
    """Tensors that are never trained."""
    token_types: str | None = None
    """Argument of transformers' model that marks tokens of images."""
    has_row_ends = False
    """Whether a token follows each row of features of an image."""
    is_gated = False
    """Whether the feed-forward part multiplies two projections."""
    around: tuple[str, str] | None = None
    """Name of the token that a template writes for an image, and the text that replaces it, with names of tokens in
    braces; None if the template writes all of it."""

    def fixed_side(self, section: VisionSection) -> int | None:
        """Returns the rows and columns of every image, in patches; None if sizes differ."""
        return None

    @abstractmethod
    def broken_rules(self, section: VisionSection) -> Iterator[str]:
        """Yields a message for every broken rule of `model.vision`, without this prefix."""

    @abstractmethod
    def shapes(self, section: VisionSection, hidden_size: int) -> dict[str, Sizes]:
        """Returns name -> shape of each parameter, for a language model of width `hidden_size`."""

    @abstractmethod
    def projections(self, section: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
        """Returns the rows and columns of each matrix that the projector multiplies a feature by."""

    @abstractmethod
    def read(self, config: ConfigJson, sizes: Mapping[str, int], family: TrainedTower) -> dict[str, Any]:
        """Returns the keys of `model.vision` besides `sizes`, those of `fields`; raises DataError for an unsupported
        tower."""

    @abstractmethod
    def written(self, section: VisionSection, hidden_size: int, norm_epsilon: float) -> dict[str, Any]:
        """Returns the fields of a config.json from which transformers builds tower and projector.

        Args:
            section: Sizes of the tower.
            hidden_size: Width of the language model.
            norm_epsilon: Epsilon of the language model's norms.
        """

    @abstractmethod
    def patches(self, section: VisionSection, image: ProcessedImage) -> tuple[Any, tuple[int, int, int]]:
        """Returns the patches of an image, a float32 array [patches, elements], and their frames, rows and columns;
        raises DataError if they do not fit the tower."""

    def is_trained(self, name: str, section: VisionSection) -> bool:
        """Says whether a parameter is trained."""
        is_frozen = section.freeze_projector if name.startswith(self.projector) else section.freeze_tower
        return not is_frozen and name not in self.constants

    def layer_matrices(self, section: VisionSection) -> list[tuple[int, int]]:
        """Returns the rows and columns of each matrix of a layer."""
        width, wide = section.hidden_size, section.ffn_hidden_size
        return [(3 * width, width), (width, width), *(1 + self.is_gated) * [(wide, width)], (width, wide)]

    def kept_patch_elements(self, section: VisionSection, hidden_size: int, is_half: bool) -> int:
        """Returns the elements per patch that a forward pass saves for its backward pass; parts below the first trained
        one save nothing.

        Measured on the modules of transformers, without statistics of norms and attention, masks, and the cosines of
        positions.
        """
        if section.is_frozen:
            return 0
        projector = self.kept_projector_elements(section, hidden_size, is_half)
        if section.freeze_tower:
            return projector
        layers = section.num_layers * self.kept_layer_elements(section, is_half)
        return section.patch_elements + self.kept_around_layers(section, is_half) + layers + projector

    def kept_layer_elements(self, section: VisionSection, is_half: bool) -> int:
        """Returns the elements per patch that a layer saves for its backward pass."""
        # inputs of both norms and three projections, queries, keys and values before and after rotation, and the output
        # of attention; both sides of the activation
        return 11 * section.hidden_size + 2 * section.ffn_hidden_size

    def kept_projector_elements(self, section: VisionSection, hidden_size: int, is_half: bool) -> int:
        """Returns the elements per patch that the projector saves if it or the tower is trained."""
        # of each merger: inputs of its norm, of both projections and of the activation
        return (2 if section.freeze_projector else 4) * section.hidden_size * (1 + len(section.deepstack))

    def kept_around_layers(self, section: VisionSection, is_half: bool) -> int:
        """Returns the elements per patch that a trained tower saves before and after its layers, without the patch."""
        # the next layer saves the input of a deeper merger's norm anyway
        return -section.hidden_size * len(section.deepstack)

    def passing_patch_elements(self, section: VisionSection, is_half: bool) -> int:
        """Returns the largest number of elements per patch that exist only during a layer."""
        width = section.hidden_size  # rotation is in float32
        return max((2 + self.is_gated) * section.ffn_hidden_size + 6 * width, (21 if is_half else 11) * width)

    def vision_config(self, section: VisionSection) -> dict[str, Any]:
        """Returns the sizes of a tower as fields of `vision_config`."""
        sizes = {theirs: getattr(section, ours) for theirs, (ours, _) in self.fields.sizes.items()}
        return sizes | {self.fields.activation[0]: section.activation}


def uneven_heads(section: VisionSection) -> Iterator[str]:
    if section.hidden_size % (4 * section.num_attention_heads):
        yield (
            f"hidden_size={section.hidden_size} must be a multiple of 4 x num_attention_heads="
            f"{section.num_attention_heads}, since rows and columns each rotate pairs of a head; change one of them"
        )


def without_axes(section: VisionSection) -> Iterator[str]:
    """Yields the broken rules of a tower whose images count like text."""
    if section.frames_per_patch != 1:
        yield f"frames_per_patch={section.frames_per_patch} must be 1 for kind={section.kind}; change it"
    for name, value in {"rope_sections": section.rope_sections, "deepstack": section.deepstack}.items():
        if value:
            yield f"{name}={list(value)} has no meaning for kind={section.kind}; remove it"


def uneven_grid(section: VisionSection) -> Iterator[str]:
    if isqrt(section.num_positions) ** 2 != section.num_positions:
        yield f"num_positions={section.num_positions} must be a square number, since the grid is square; change it"


def square_patches(pixels: Any, size: int) -> tuple[Any, tuple[int, int, int]]:
    """Cuts one image, [1, channels, height, width], into patches of `size` x `size` pixels, row by row."""
    _, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    patches = pixels.reshape(channels, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    return patches.reshape(rows * columns, -1), (1, rows, columns)


def norm(name: str, width: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def linear(name: str, rows: int, columns: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
