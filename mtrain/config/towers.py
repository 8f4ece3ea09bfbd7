"""Kinds of vision towers (`model.vision.kind`), an object each."""

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any, final

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.base.tensor_slice import Sizes
from mtrain.config.schema.vision import (
    VISION,
    ConfigJson,
    Fields,
    ProcessedImage,
    TowerDescription,
    TowerKind,
    TrainedTower,
    VisionSection,
    linear,
    norm,
    square_patches,
    uneven_grid,
    uneven_heads,
    without_axes,
)

_DEEPSTACK = "deepstack_visual_indexes"


@final
class Qwen3VlTower(TowerDescription):
    """Images of any size, whose tokens have positions of time, height and width."""

    name = "Qwen3-VL"
    fields = Fields(
        {
            "depth": ("num_layers", 27),
            "hidden_size": ("hidden_size", 1152),
            "intermediate_size": ("ffn_hidden_size", 4304),
            "num_heads": ("num_attention_heads", 16),
            "in_channels": ("num_channels", 3),
            "patch_size": ("patch_size", 16),
            "temporal_patch_size": ("frames_per_patch", 2),
            "spatial_merge_size": ("merge_size", 2),
            "num_position_embeddings": ("num_positions", 2304),
        },
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0}},
        ("model_type", "initializer_range", "out_hidden_size", _DEEPSTACK),
    )
    projector = ("merger.", "deepstack_merger_list.")
    token_types = "mm_token_type_ids"
    prefixes = (("", ("model.visual.",)),)

    def broken_rules(self, section: VisionSection) -> Iterator[str]:
        yield from uneven_heads(section)
        if section.rope_sections is None:
            yield "rope_sections is missing; give the numbers of pairs for time, height and width"
        elif min(section.rope_sections) < 0:
            yield f"rope_sections={list(section.rope_sections)} must be at least 0; change them"
        yield from uneven_grid(section)
        if list(section.deepstack) != sorted({*section.deepstack} & {*range(section.num_layers)}):
            yield (
                f"deepstack={list(section.deepstack)} must be ascending numbers of layers of the tower, from 0 to "
                f"{section.num_layers - 1}; change it"
            )

    def shapes(self, section: VisionSection, hidden_size: int) -> dict[str, Sizes]:
        width, wide = section.hidden_size, section.ffn_hidden_size
        merged = section.patches_per_feature * width
        patch = (section.num_channels, section.frames_per_patch, section.patch_size, section.patch_size)
        shapes: dict[str, Sizes] = {
            "pos_embed.weight": (section.num_positions, width),
            "patch_embed.proj.weight": (width, *patch),
            "patch_embed.proj.bias": (width,),
        }
        for layer in range(section.num_layers):
            block = f"blocks.{layer}."
            shapes |= norm(f"{block}norm1", width) | norm(f"{block}norm2", width)
            shapes |= linear(f"{block}attn.qkv", 3 * width, width) | linear(f"{block}attn.proj", width, width)
            shapes |= linear(f"{block}mlp.linear_fc1", wide, width) | linear(f"{block}mlp.linear_fc2", width, wide)
        shapes |= _merger("merger", width, merged, hidden_size)
        for number, _ in enumerate(section.deepstack):
            shapes |= _merger(f"deepstack_merger_list.{number}", merged, merged, hidden_size)
        return shapes

    def projections(self, section: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
        merged = section.patches_per_feature * section.hidden_size
        return (1 + len(section.deepstack)) * [(merged, merged), (hidden_size, merged)]

    def read(self, config: ConfigJson, sizes: Mapping[str, int], family: TrainedTower) -> dict[str, Any]:
        if family.deepstack is None and config.tower.get(_DEEPSTACK) not in (None, False, []):
            raise DataError(
                f"config.json: {VISION}.{_DEEPSTACK}={config.shown(config.tower[_DEEPSTACK])} is not supported in a "
                "vision tower"
            )
        width, needed = config.needed(config.tower, "out_hidden_size", int, 3584), config.text.get("hidden_size")
        if width != needed:
            raise DataError(
                f"config.json: {VISION}.out_hidden_size={width} must equal the hidden_size of the text model, "
                f"{config.shown(needed)}"
            )
        if config.rope.get("mrope_interleaved", True) is not True:
            raise DataError("config.json: mrope_interleaved must be true, because axes alternate in this family")
        return {
            "deepstack": () if family.deepstack is None else config.tower.get(_DEEPSTACK, family.deepstack),
            "rope_sections": config.rope.get("mrope_section", family.rope_sections),
            "image_token": config.needed(config.model, "image_token_id", int, family.image_token),
        }

    def written(self, section: VisionSection, hidden_size: int, norm_epsilon: float) -> dict[str, Any]:
        of_tower = {"out_hidden_size": hidden_size, _DEEPSTACK: list(section.deepstack)}
        return {VISION: self.vision_config(section) | of_tower}

    def patches(self, section: VisionSection, image: ProcessedImage) -> tuple[Any, tuple[int, int, int]]:
        pixels, merge_size = image.outputs["pixel_values"], getattr(image.processor, "merge_size", None)
        size, has_grid = pixels.shape[-1], "image_grid_thw" in image.outputs
        if not has_grid or merge_size != section.merge_size or size != section.patch_elements:
            raise DataError(
                f"becomes patches of {size} numbers (merge_size={merge_size}) with {image.source}, but model.vision "
                f"needs {section.patch_elements} (merge_size={section.merge_size}); set data.tokenizer to the folder "
                "of the model"
            )
        frames, rows, columns = map(int, image.outputs["image_grid_thw"][0])
        return pixels, (frames, rows, columns)


def _merger(name: str, normed: int, merged: int, hidden_size: int) -> dict[str, Sizes]:
    inner = norm(f"{name}.norm", normed) | linear(f"{name}.linear_fc1", merged, merged)
    return inner | linear(f"{name}.linear_fc2", hidden_size, merged)


@final
class Gemma3Tower(TowerDescription):
    """Images of one size, whose tokens see each other both ways and count like text."""

    name = "Gemma 3"
    fields = Fields(
        {
            "num_hidden_layers": ("num_layers", 12),
            "hidden_size": ("hidden_size", 768),
            "intermediate_size": ("ffn_hidden_size", 3072),
            "num_attention_heads": ("num_attention_heads", 12),
            "num_channels": ("num_channels", 3),
            "patch_size": ("patch_size", 16),
        },
        {"layer_norm_eps": 1e-6},
        ("model_type", "image_size", "vision_use_head"),
    )
    prefixes = (
        # as published; as transformers 5 writes it; and as both have it in memory
        (
            "vision_tower.",
            ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."),
        ),
        ("multi_modal_projector.", ("multi_modal_projector.", "model.multi_modal_projector.")),
    )
    bidirectional = "all"
    token_types = "token_type_ids"
    # transformers 5.24, processing_gemma3.py, Gemma3Processor.__init__
    around = ("boi", "\n\n{boi}{image}{eoi}\n\n")

    def fixed_side(self, section: VisionSection) -> int:
        return isqrt(section.num_positions)

    def broken_rules(self, section: VisionSection) -> Iterator[str]:
        yield from without_axes(section)
        if section.hidden_size % section.num_attention_heads:
            yield (
                f"hidden_size={section.hidden_size} must be a multiple of num_attention_heads="
                f"{section.num_attention_heads}; change one of them"
            )
        if (side := self.fixed_side(section)) % section.merge_size:
            yield (
                f"merge_size={section.merge_size} must divide the {counted(side, 'row')} of "
                f"num_positions={section.num_positions}; change one of them"
            )
        yield from uneven_grid(section)

    def shapes(self, section: VisionSection, hidden_size: int) -> dict[str, Sizes]:
        width, wide, tower = section.hidden_size, section.ffn_hidden_size, "vision_tower."
        shapes: dict[str, Sizes] = {
            f"{tower}embeddings.patch_embedding.weight": (width, section.num_channels, *[section.patch_size] * 2),
            f"{tower}embeddings.patch_embedding.bias": (width,),
            f"{tower}embeddings.position_embedding.weight": (section.num_positions, width),
        }
        for layer in range(section.num_layers):
            block = f"{tower}encoder.layers.{layer}."
            shapes |= norm(f"{block}layer_norm1", width)
            for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                shapes |= linear(f"{block}self_attn.{projection}", width, width)
            shapes |= norm(f"{block}layer_norm2", width)
            shapes |= linear(f"{block}mlp.fc1", wide, width) | linear(f"{block}mlp.fc2", width, wide)
        return (
            shapes
            | norm(f"{tower}post_layernorm", width)
            | {
                "multi_modal_projector.mm_input_projection_weight": (width, hidden_size),
                "multi_modal_projector.mm_soft_emb_norm.weight": (width,),
            }
        )

    def projections(self, section: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
        return [(hidden_size, section.hidden_size)]

    def kept_layer_elements(self, section: VisionSection, is_half: bool) -> int:
        return 8 * section.hidden_size + 2 * section.ffn_hidden_size  # without rotation

    def kept_projector_elements(self, section: VisionSection, hidden_size: int, is_half: bool) -> int:
        # of a feature, the norm's input if that has a gradient, in float32; what it multiplies by its weight, in
        # float32, and the input of the projection, for their gradients
        wide = 2 if is_half else 1
        copies = (not section.freeze_tower) * wide + (not section.freeze_projector) * (wide + 1)
        return copies * section.hidden_size // section.patches_per_feature

    def kept_around_layers(self, section: VisionSection, is_half: bool) -> int:
        return 2 * section.hidden_size  # inputs of the last norm and of the average

    def passing_patch_elements(self, section: VisionSection, is_half: bool) -> int:
        width, pixels = section.hidden_size, (2 if is_half else 1) * section.patch_elements
        return max(2 * section.ffn_hidden_size + 4 * width, 8 * width) + pixels

    def read(self, config: ConfigJson, sizes: Mapping[str, int], family: TrainedTower) -> dict[str, Any]:
        if config.needed(config.tower, "vision_use_head", bool, True):
            raise DataError(
                f"config.json: {VISION}.vision_use_head=True (a head that the features do not use) is not supported, "
                "but False is needed"
            )
        side, remainder = divmod(config.needed(config.tower, "image_size", int, 224), max(1, sizes["patch_size"]))
        tokens = config.needed(config.model, "mm_tokens_per_image", int, 256)
        if remainder or tokens < 1 or isqrt(tokens) ** 2 != tokens or side % isqrt(tokens):
            raise DataError(
                f"config.json: {VISION}.image_size={config.shown(config.tower.get('image_size'))} with patch_size="
                f"{sizes['patch_size']} does not divide into mm_tokens_per_image={tokens} equal squares of whole "
                "patches; correct the file"
            )
        # transformers 5.24 reads either name
        name = "image_token_id" if "image_token_id" in config.model else "image_token_index"
        return {
            "num_positions": side**2,
            "merge_size": side // isqrt(tokens),
            "frames_per_patch": 1,
            "image_token": config.needed(config.model, name, int, family.image_token),
        }

    def written(self, section: VisionSection, hidden_size: int, norm_epsilon: float) -> dict[str, Any]:
        size = {"image_size": self.fixed_side(section) * section.patch_size, "vision_use_head": False}
        return {
            "text_config": {"hidden_size": hidden_size, "num_attention_heads": 1},
            VISION: {"model_type": "siglip_vision_model", **self.vision_config(section), **size},
            "mm_tokens_per_image": section.num_positions // section.patches_per_feature,
        }

    def patches(self, section: VisionSection, image: ProcessedImage) -> tuple[Any, tuple[int, int, int]]:
        pixels, side = image.outputs["pixel_values"], self.fixed_side(section)
        if len(pixels) > 1:
            raise DataError(
                f"becomes {len(pixels)} crops with {image.source}, but crops are not supported; set do_pan_and_scan to "
                "false there"
            )
        shape = (section.num_channels, side * section.patch_size, side * section.patch_size)
        num_features = section.num_positions // section.patches_per_feature
        if pixels.shape[1:] != shape or image.num_tokens != num_features:
            raise DataError(
                f"becomes {list(pixels.shape[1:])} numbers and {counted(image.num_tokens, 'token')} with "
                f"{image.source}, but model.vision needs {list(shape)} and {num_features}; set data.tokenizer to the "
                "folder of the model"
            )
        return square_patches(pixels, section.patch_size)


_ROPE_BASE = 10000.0
_PROJECTOR_OF_MISTRAL = {"projector_hidden_act": "gelu", "vision_feature_layer": -1, "multimodal_projector_bias": False}
"""Field -> the only value that is supported, which is the default."""


@final
class Mistral3Tower(TowerDescription):
    """Images of any size, whose tokens count like text; a token follows each row of features."""

    name = "Mistral 3"
    fields = Fields(
        {
            "num_hidden_layers": ("num_layers", 24),
            "hidden_size": ("hidden_size", 1024),
            "intermediate_size": ("ffn_hidden_size", 4096),
            "num_attention_heads": ("num_attention_heads", 16),
            "num_channels": ("num_channels", 3),
            "patch_size": ("patch_size", 16),
        },
        {"attention_dropout": 0.0, "rope_theta": _ROPE_BASE},
        # transformers computes head_dim from the sizes, and rotates images of any size
        ("model_type", "image_size", "head_dim", "initializer_range", "rope_parameters"),
        activation=("hidden_act", "gelu"),
    )
    # as published, and as in memory
    prefixes = tuple((part, (part, f"model.{part}")) for part in ("vision_tower.", "multi_modal_projector."))
    has_row_ends = True
    is_gated = True

    def broken_rules(self, section: VisionSection) -> Iterator[str]:
        yield from uneven_heads(section)
        yield from without_axes(section)
        if section.num_positions != 1:
            yield f"num_positions={section.num_positions} must be 1 for kind=mistral3, which has no table; change it"

    def shapes(self, section: VisionSection, hidden_size: int) -> dict[str, Sizes]:
        width, wide = section.hidden_size, section.ffn_hidden_size
        tower, projector = "vision_tower.", "multi_modal_projector."
        shapes: dict[str, Sizes] = {
            f"{tower}patch_conv.weight": (width, section.num_channels, *[section.patch_size] * 2),
            f"{tower}ln_pre.weight": (width,),
        }
        for layer in range(section.num_layers):
            block = f"{tower}transformer.layers.{layer}."
            shapes[f"{block}attention_norm.weight"] = (width,)
            shapes |= {f"{block}feed_forward.{name}_proj.weight": (wide, width) for name in ("gate", "up")}
            shapes[f"{block}feed_forward.down_proj.weight"] = (width, wide)
            shapes |= {f"{block}attention.{name}_proj.weight": (width, width) for name in "kvqo"}
            shapes[f"{block}ffn_norm.weight"] = (width,)
        return shapes | {
            f"{projector}norm.weight": (width,),
            f"{projector}patch_merger.merging_layer.weight": (width, section.patches_per_feature * width),
            f"{projector}linear_1.weight": (hidden_size, width),
            f"{projector}linear_2.weight": (hidden_size, hidden_size),
        }

    def projections(self, section: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
        width = section.hidden_size
        return [(width, section.patches_per_feature * width), (hidden_size, width), (hidden_size, hidden_size)]

    def kept_layer_elements(self, section: VisionSection, is_half: bool) -> int:
        # of each norm its input, in float32, and what it multiplies by its weight; inputs of three projections;
        # queries, keys and values, and the output of attention, which is an input; a gate and its product
        return (12 if is_half else 10) * section.hidden_size + 4 * section.ffn_hidden_size

    def kept_projector_elements(self, section: VisionSection, hidden_size: int, is_half: bool) -> int:
        per_feature = hidden_size  # the input of the activation
        if not section.freeze_projector:  # inputs of three projections, and what a norm multiplies by its weight
            per_feature += (1 + 2 * section.patches_per_feature) * section.hidden_size + hidden_size
        return per_feature // section.patches_per_feature

    def kept_around_layers(self, section: VisionSection, is_half: bool) -> int:
        # both sides of the first norm, and the input of the projector's; both inputs in float32
        return (5 if is_half else 3) * section.hidden_size

    def passing_patch_elements(self, section: VisionSection, is_half: bool) -> int:
        return super().passing_patch_elements(section, is_half=False)  # rotation keeps the dtype

    def read(self, config: ConfigJson, sizes: Mapping[str, int], family: TrainedTower) -> dict[str, Any]:
        config.check_axial_rope(_ROPE_BASE)
        for field, needed in _PROJECTOR_OF_MISTRAL.items():
            value = config.model.get(field, needed)
            if value != needed or isinstance(value, bool) != isinstance(needed, bool):
                raise config.unsupported(field, value, needed)
        # transformers 5.24 reads either name
        name = "image_token_id" if "image_token_id" in config.model else "image_token_index"
        return {
            "num_positions": 1,
            "merge_size": config.needed(config.model, "spatial_merge_size", int, 2),
            "frames_per_patch": 1,
            "image_token": config.needed(config.model, name, int, family.image_token),
        }

    def written(self, section: VisionSection, hidden_size: int, norm_epsilon: float) -> dict[str, Any]:
        return {
            "text_config": {"model_type": "mistral", "hidden_size": hidden_size, "rms_norm_eps": norm_epsilon},
            VISION: {"model_type": "pixtral", **self.vision_config(section)},
            "spatial_merge_size": section.merge_size,
        }

    def patches(self, section: VisionSection, image: ProcessedImage) -> tuple[Any, tuple[int, int, int]]:
        return square_patches(image.outputs["pixel_values"], section.patch_size)


@final
class Gemma4Tower(TowerDescription):
    """Images of any size, whose tokens count like text and see each other both ways in layers with a window."""

    name = "Gemma 4"
    fields = Fields(
        {
            "num_hidden_layers": ("num_layers", 16),
            "hidden_size": ("hidden_size", 768),
            "intermediate_size": ("ffn_hidden_size", 3072),
            "num_attention_heads": ("num_attention_heads", 12),
            "patch_size": ("patch_size", 16),
            "pooling_kernel_size": ("merge_size", 3),
            "position_embedding_size": ("num_positions", 10240),
        },
        {"rms_norm_eps": 1e-6, "attention_dropout": 0.0},
        (
            *("model_type", "initializer_range", "rope_parameters", "head_dim", "num_key_value_heads", "standardize"),
            *("default_output_length", "global_head_dim"),  # transformers 5 does not read these of published files
        ),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    projector = ("embed_vision.",)
    prefixes = tuple((part, (f"model.{part}",)) for part in ("vision_tower.", "embed_vision."))
    bidirectional = "windowed"
    token_types = "mm_token_type_ids"
    is_gated = True
    constants = ("vision_tower.std_bias", "vision_tower.std_scale")
    # transformers 5.24, processing_gemma4.py, Gemma4Processor.replace_image_token
    around = ("image", "{boi}{image}{eoi}")

    def broken_rules(self, section: VisionSection) -> Iterator[str]:
        yield from uneven_heads(section)
        yield from without_axes(section)
        if section.num_channels != 3:
            yield f"num_channels={section.num_channels} must be 3 for kind=gemma4; change it"

    def shapes(self, section: VisionSection, hidden_size: int) -> dict[str, Sizes]:
        width, wide, tower = section.hidden_size, section.ffn_hidden_size, "vision_tower."
        head_dim = width // section.num_attention_heads
        shapes: dict[str, Sizes] = dict.fromkeys(self.constants if section.standardize else (), (width,))
        shapes |= {
            f"{tower}patch_embedder.position_embedding_table": (2, section.num_positions, width),
            f"{tower}patch_embedder.input_proj.weight": (width, section.patch_elements),
        }
        for layer in range(section.num_layers):
            block = f"{tower}encoder.layers.{layer}."
            shapes |= {f"{block}self_attn.{name}_proj.linear.weight": (width, width) for name in "qkvo"}
            shapes |= {f"{block}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
            shapes |= {f"{block}mlp.{name}_proj.linear.weight": (wide, width) for name in ("gate", "up")}
            shapes[f"{block}mlp.down_proj.linear.weight"] = (width, wide)
            for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                shapes[f"{block}{place}_layernorm.weight"] = (width,)
        return shapes | {"embed_vision.embedding_projection.weight": (hidden_size, width)}

    def projections(self, section: VisionSection, hidden_size: int) -> list[tuple[int, int]]:
        return [(hidden_size, section.hidden_size)]

    def kept_layer_elements(self, section: VisionSection, is_half: bool) -> int:
        # in float32: of each of four norms its input and the product before its weight, and as much for the norms of
        # queries, keys and values, without one input; inputs of two projections, queries, keys, values and the output
        # of attention; a gate, its activation, and inputs of two products
        return (32 if is_half else 19) * section.hidden_size + 4 * section.ffn_hidden_size

    def kept_projector_elements(self, section: VisionSection, hidden_size: int, is_half: bool) -> int:
        return 0 if section.freeze_projector else section.hidden_size // section.patches_per_feature

    def kept_around_layers(self, section: VisionSection, is_half: bool) -> int:
        # the input of the projector's norm, in float32
        return (1 + is_half) * section.hidden_size // section.patches_per_feature

    def passing_patch_elements(self, section: VisionSection, is_half: bool) -> int:
        return super().passing_patch_elements(section, is_half=False)  # rotation keeps the dtype

    def read(self, config: ConfigJson, sizes: Mapping[str, int], family: TrainedTower) -> dict[str, Any]:
        config.check_axial_rope(100.0)
        heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
        if (number := config.needed(config.tower, "num_key_value_heads", int, 12)) != heads:
            raise config.unsupported(f"{VISION}.num_key_value_heads", number, f"num_attention_heads={heads}")
        if (size := config.needed(config.tower, "head_dim", int, 64)) * heads != width:
            raise config.unsupported(f"{VISION}.head_dim", size, f"hidden_size / num_attention_heads={width / heads:g}")
        if (seen := config.text.get("use_bidirectional_attention")) != "vision":
            raise config.unsupported("use_bidirectional_attention", seen, "'vision' with model.vision")
        return {
            "frames_per_patch": 1,
            "standardize": config.needed(config.tower, "standardize", bool, False),
            "image_token": config.needed(config.model, "image_token_id", int, family.image_token),
        }

    def written(self, section: VisionSection, hidden_size: int, norm_epsilon: float) -> dict[str, Any]:
        heads = section.num_attention_heads
        of_heads = {"num_key_value_heads": heads, "head_dim": section.hidden_size // heads}
        more = {"model_type": "gemma4_vision", "standardize": section.standardize, **of_heads}
        return {"text_config": {"hidden_size": hidden_size}, VISION: self.vision_config(section) | more}

    def patches(self, section: VisionSection, image: ProcessedImage) -> tuple[Any, tuple[int, int, int]]:
        (pixels,), (positions,) = image.outputs["pixel_values"], image.outputs["image_position_ids"]
        size, merge_size = pixels.shape[-1], getattr(image.processor, "pooling_kernel_size", None)
        if merge_size != section.merge_size or size != section.patch_elements:
            raise DataError(
                f"becomes patches of {size} numbers (pooling_kernel_size={merge_size}) with {image.source}, but "
                f"model.vision needs {section.patch_elements} (pooling_kernel_size={section.merge_size}); set "
                "data.tokenizer to the folder of the model"
            )
        columns, rows = (positions.max(axis=0) + 1).tolist()  # padding, after the patches, is -1
        return pixels[: rows * columns], (1, rows, columns)


TOWERS: dict[TowerKind, TowerDescription] = {
    "qwen3_vl": Qwen3VlTower(),
    "gemma3": Gemma3Tower(),
    "mistral3": Mistral3Tower(),
    "gemma4": Gemma4Tower(),
}


def description_of(vision: VisionSection) -> TowerDescription:
    return TOWERS[vision.kind]
