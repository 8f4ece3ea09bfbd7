"""Vision towers: features of images that replace embeddings, and the tensors of a tower by name."""

from math import prod
from typing import Any, assert_never, final

from mtrain.arch.features.feature import SMALL_HEAD_DIM, Feature, SmallRun
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema.data import AnyData, SftSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.train import TrainSection
from mtrain.config.schema.vision import VisionSection

PROJECTOR = ("merger.", "deepstack_merger_list.", "multi_modal_projector.")
"""Prefixes of the projector's tensors."""
KEY = "vision."
"""Prefix of the global names of a tower's tensors."""
_PATCHES_OF_IMAGE = 4096
"""Patches of an image whose size is not limited: a megapixel of patches of 16 x 16 pixels."""


@final
class Vision(Feature):
    """Images among the tokens; positions have three axes."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return None if model.vision is None else "model.vision"

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        if model.vision is None:
            return {}
        sizes: dict[str, Any] = {
            "num_layers": min(model.vision.num_layers, 2),
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_attention_heads": 2,
            "patch_size": 2,
            "num_positions": min(model.vision.num_positions, 16 if model.vision.fixed_side is None else 36),
            "merge_size": 2,
            "image_token": 0,
            # one, since the first stage may have one layer
            "deepstack": (0,) if model.vision.deepstack else (),
        }
        if model.vision.rope_sections is None:
            return {"vision": model.vision.model_dump() | sizes}
        # a whole head rotates, since fewer pairs would all turn with time
        height = width = SMALL_HEAD_DIM // 8
        sizes["rope_sections"] = (SMALL_HEAD_DIM // 2 - height - width, height, width)
        return {"vision": model.vision.model_dump() | sizes, "rope": model.rope.model_dump() | {"partial": 1.0}}


def tower_shapes(vision: VisionSection, hidden_size: int) -> dict[str, Sizes]:
    """Returns name -> shape of each parameter of a tower, for a language model of width `hidden_size`."""
    match vision.kind:
        case "qwen3_vl":
            return _qwen3_vl_shapes(vision, hidden_size)
        case "gemma3":
            return _gemma3_shapes(vision, hidden_size)
        case "mistral3":
            return _mistral3_shapes(vision, hidden_size)
        case _:
            assert_never(vision.kind)


def _qwen3_vl_shapes(vision: VisionSection, hidden_size: int) -> dict[str, Sizes]:
    width, wide, merged = vision.hidden_size, vision.ffn_hidden_size, vision.patches_per_feature * vision.hidden_size
    patch = (vision.num_channels, vision.frames_per_patch, vision.patch_size, vision.patch_size)
    shapes: dict[str, Sizes] = {
        "pos_embed.weight": (vision.num_positions, width),
        "patch_embed.proj.weight": (width, *patch),
        "patch_embed.proj.bias": (width,),
    }
    for layer in range(vision.num_layers):
        block = f"blocks.{layer}."
        shapes |= _norm(f"{block}norm1", width) | _norm(f"{block}norm2", width)
        shapes |= _linear(f"{block}attn.qkv", 3 * width, width) | _linear(f"{block}attn.proj", width, width)
        shapes |= _linear(f"{block}mlp.linear_fc1", wide, width) | _linear(f"{block}mlp.linear_fc2", width, wide)
    shapes |= _merger("merger", width, merged, hidden_size)
    for number, _ in enumerate(vision.deepstack):
        shapes |= _merger(f"deepstack_merger_list.{number}", merged, merged, hidden_size)
    return shapes


def _gemma3_shapes(vision: VisionSection, hidden_size: int) -> dict[str, Sizes]:
    width, wide, tower = vision.hidden_size, vision.ffn_hidden_size, "vision_tower."
    shapes: dict[str, Sizes] = {
        f"{tower}embeddings.patch_embedding.weight": (width, vision.num_channels, *[vision.patch_size] * 2),
        f"{tower}embeddings.patch_embedding.bias": (width,),
        f"{tower}embeddings.position_embedding.weight": (vision.num_positions, width),
    }
    for layer in range(vision.num_layers):
        block = f"{tower}encoder.layers.{layer}."
        shapes |= _norm(f"{block}layer_norm1", width)
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes |= _linear(f"{block}self_attn.{projection}", width, width)
        shapes |= _norm(f"{block}layer_norm2", width)
        shapes |= _linear(f"{block}mlp.fc1", wide, width) | _linear(f"{block}mlp.fc2", width, wide)
    return (
        shapes
        | _norm(f"{tower}post_layernorm", width)
        | {
            "multi_modal_projector.mm_input_projection_weight": (width, hidden_size),
            "multi_modal_projector.mm_soft_emb_norm.weight": (width,),
        }
    )


def _mistral3_shapes(vision: VisionSection, hidden_size: int) -> dict[str, Sizes]:
    width, wide, tower, projector = (
        vision.hidden_size,
        vision.ffn_hidden_size,
        "vision_tower.",
        "multi_modal_projector.",
    )
    shapes: dict[str, Sizes] = {
        f"{tower}patch_conv.weight": (width, vision.num_channels, *[vision.patch_size] * 2),
        f"{tower}ln_pre.weight": (width,),
    }
    for layer in range(vision.num_layers):
        block = f"{tower}transformer.layers.{layer}."
        shapes[f"{block}attention_norm.weight"] = (width,)
        shapes |= {f"{block}feed_forward.{name}_proj.weight": (wide, width) for name in ("gate", "up")}
        shapes[f"{block}feed_forward.down_proj.weight"] = (width, wide)
        shapes |= {f"{block}attention.{name}_proj.weight": (width, width) for name in "kvqo"}
        shapes[f"{block}ffn_norm.weight"] = (width,)
    return shapes | {
        f"{projector}norm.weight": (width,),
        f"{projector}patch_merger.merging_layer.weight": (width, vision.patches_per_feature * width),
        f"{projector}linear_1.weight": (hidden_size, width),
        f"{projector}linear_2.weight": (hidden_size, hidden_size),
    }


def num_tower_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower; 0 without one."""
    return 0 if vision is None else sum(map(prod, tower_shapes(vision, hidden_size).values()))


def is_trained(vision: VisionSection, name: str) -> bool:
    """Says whether a tensor of a tower is trained; `name` is without KEY."""
    return not (vision.freeze_projector if name.startswith(PROJECTOR) else vision.freeze_tower)


def trained_tower_sizes(vision: VisionSection | None, hidden_size: int) -> list[int]:
    """Returns the number of elements of each trained parameter of a tower; empty without one."""
    if vision is None:
        return []
    return [prod(shape) for name, shape in tower_shapes(vision, hidden_size).items() if is_trained(vision, name)]


def is_matrix(name: str, shape: Sizes) -> bool:
    """Says whether Muon updates a tensor of a tower: neither vectors, nor the convolution of patches, nor the table of
    positions, whose rows belong to one position each."""
    return len(shape) == 2 and not name.endswith(("pos_embed.weight", "position_embedding.weight"))


def matrix_rows(name: str, num_rows: int) -> list[int]:
    """Returns the rows of each matrix in a tensor of a tower; qwen3_vl joins queries, keys and values."""
    return [num_rows // 3] * 3 if name.endswith(".qkv.weight") else [num_rows]


def num_trained_in_matrices(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the elements of a tower's trained matrices; see `is_matrix`."""
    shapes = {} if vision is None else tower_shapes(vision, hidden_size)
    return sum(
        prod(shape)
        for name, shape in shapes.items()
        if vision is not None and is_trained(vision, name) and is_matrix(name, shape)
    )


def num_frozen_parameters(vision: VisionSection | None, hidden_size: int) -> int:
    """Counts the parameters of a tower that are not trained."""
    return num_tower_parameters(vision, hidden_size) - sum(trained_tower_sizes(vision, hidden_size))


def patches_of_tokens(vision: VisionSection | None, data: AnyData, tokens: int) -> tuple[int, int]:
    """Returns the patches of a row of `tokens` tokens, and of one of its images, if all tokens are of large images; 0
    for data that have no images.

    An image has as many patches as `data.images.max_pixels` allows; without a limit, _PATCHES_OF_IMAGE.
    """
    if vision is None or not isinstance(data, SftSection):
        return 0, 0
    limit = data.images.max_pixels
    patches = tokens * vision.patches_per_feature
    return patches, min(patches, _PATCHES_OF_IMAGE if limit is None else limit // vision.patch_size**2)


def projections(vision: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
    """Returns the rows and columns of each matrix that the projector multiplies a feature by."""
    match vision.kind:
        case "qwen3_vl":
            merged = vision.patches_per_feature * vision.hidden_size
            return (1 + len(vision.deepstack)) * [(merged, merged), (hidden_size, merged)]
        case "gemma3":
            return [(hidden_size, vision.hidden_size)]
        case "mistral3":
            width = vision.hidden_size
            return [(width, vision.patches_per_feature * width), (hidden_size, width), (hidden_size, hidden_size)]
        case _:
            assert_never(vision.kind)


def layer_matrices(vision: VisionSection) -> list[tuple[int, int]]:
    """Returns the rows and columns of each matrix of a layer of the tower."""
    width, wide = vision.hidden_size, vision.ffn_hidden_size
    return [(3 * width, width), (width, width), *_num_up(vision) * [(wide, width)], (width, wide)]


def _num_up(vision: VisionSection) -> int:
    """Counts the projections to the width of the feed-forward part, which a gate adds one to."""
    return 2 if vision.kind == "mistral3" else 1


def kept_patch_elements(vision: VisionSection, hidden_size: int, is_half: bool) -> int:
    """Returns the elements per patch that a forward pass of the tower saves for its backward pass; parts below the
    first trained one save nothing.

    Measured on the modules of transformers, without statistics of norms and attention, masks, and the cosines of
    positions.
    """
    width, num_mergers = vision.hidden_size, 1 + len(vision.deepstack)
    layers = vision.num_layers * kept_layer_elements(vision, is_half)
    if vision.kind == "mistral3":
        if vision.freeze_tower and vision.freeze_projector:
            return 0
        per_feature = hidden_size  # the input of the activation
        if not vision.freeze_projector:  # inputs of three projections, and what a norm multiplies by its weight
            per_feature += (1 + 2 * vision.patches_per_feature) * width + hidden_size
        projector = per_feature // vision.patches_per_feature
        # both sides of the first norm, and the input of the projector's; both inputs in float32
        around = (5 if is_half else 3) * width + vision.patch_elements
        return projector if vision.freeze_tower else around + layers + projector
    # of each merger: inputs of its norm, of both projections and of the activation
    mergers = (2 if vision.freeze_projector else 4) * width * num_mergers
    if vision.freeze_tower:
        return 0 if vision.freeze_projector else mergers
    # the next layer saves the input of a deeper merger's norm anyway
    mergers -= width * len(vision.deepstack)
    return vision.patch_elements + layers + mergers


def kept_layer_elements(vision: VisionSection, is_half: bool) -> int:
    """Returns the elements per patch that a layer of the tower saves for its backward pass."""
    width, wide = vision.hidden_size, vision.ffn_hidden_size
    if vision.kind == "mistral3":
        # of each norm its input, in float32, and what it multiplies by its weight; inputs of three projections;
        # queries, keys and values, and the output of attention, which is an input; a gate and its product
        return (12 if is_half else 10) * width + 4 * wide
    # inputs of both norms and three projections, queries, keys and values before and after rotation, and the output of
    # attention; both sides of the activation
    return 11 * width + 2 * wide


def recomputes_layers(vision: VisionSection, train: TrainSection) -> bool:
    """Says whether the backward pass of a tower computes its layers again: a frozen tower has no backward pass."""
    return train.recompute == "full" and not vision.freeze_tower


def passing_patch_elements(vision: VisionSection, is_half: bool) -> int:
    """Returns the largest number of elements per patch that exist only during a layer; rotation is in float32, except
    in Mistral 3."""
    width, is_wider = vision.hidden_size, is_half and vision.kind != "mistral3"
    return max((1 + _num_up(vision)) * vision.ffn_hidden_size + 6 * width, (21 if is_wider else 11) * width)


def _merger(name: str, normed: int, merged: int, hidden_size: int) -> dict[str, Sizes]:
    inner = _norm(f"{name}.norm", normed) | _linear(f"{name}.linear_fc1", merged, merged)
    return inner | _linear(f"{name}.linear_fc2", hidden_size, merged)


def _norm(name: str, width: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, rows: int, columns: int) -> dict[str, Sizes]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
