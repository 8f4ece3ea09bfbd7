"""Rules of features that some others do not run with yet, each refused by name: sharded weights, images, fp8."""

from collections.abc import Iterator
from typing import assert_never

from mtrain.base.spelling import counted
from mtrain.config.known_issues import sizes_of_attention
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import COMPILED, Fp8Recipe, TrainSection
from mtrain.config.schema.vision import VisionSection

_FUSED = "gradient_accumulation_fusion"


def sharded_weights(config: Sections) -> Iterator[str]:
    """Yields a message for every key that `layout.shard=weights` cannot be combined with."""
    if config.layout.shard == "optimizer":
        return
    for key, remedy in _not_with_sharded_weights(config):
        yield f"{key} cannot be combined with layout.shard=weights; {remedy}, or set layout.shard=optimizer"


def _not_with_sharded_weights(config: Sections) -> Iterator[tuple[str, str]]:
    """Yields each key with its value, and what to do about it."""
    model, layout, train = config.model, config.layout, config.train
    if layout.etp > 1:
        yield f"layout.etp={layout.etp}", "set layout.etp=1"
    if train.fp8 is not None:
        yield f"train.fp8={train.fp8}", "remove it"
    if train.compile == "layers":
        yield "train.compile=layers", "use regions"
    if train.offload_layers is not None:
        yield f"train.offload_layers={train.offload_layers}", "use train.recompute=full"
    if train.offload_optimizer:
        yield "train.offload_optimizer=true", "remove it"
    if not train.distributed_optimizer:
        yield "train.distributed_optimizer=false", "remove it"
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(train, name):
            yield f"train.{name}=true", "remove it, as layers are always gathered and reduced while others compute"
    if model.backend == "te":
        yield "model.backend=te", "set model.backend=torch"
    if model.megatron.get(_FUSED):
        yield f"model.megatron.{_FUSED}", "remove it"


def images(config: Sections) -> Iterator[str]:
    """Checks that no unsupported feature is combined with a vision tower."""
    vision, train = config.model.vision, config.train
    yield from _learning_rates(config)
    if vision is None:
        return
    if config.model.backend == "te":
        yield "model.backend=te cannot be combined with model.vision; remove one of them"
    if train.fp8 is not None and not config.has_own_fp8:
        yield (
            f"train.fp8={train.fp8} with model.vision is only in our own layers; set model.backend=torch, or remove "
            "train.fp8"
        )
    if vision.deepstack:
        yield from _deepstack(len(vision.deepstack), config)
    if vision.freeze_language_model:
        yield from _frozen_language_model(vision, config)
    if train.overlap_param_gather and not vision.is_frozen:
        # ranks without images do not run the tower, so they would gather its weights after others
        yield (
            "train.overlap_param_gather=true gathers weights in the order in which every rank uses them, but ranks "
            "without images do not use the tower, which model.vision.freeze_tower=false or freeze_projector=false "
            "trains; set train.overlap_param_gather to false, or freeze both"
        )


def _learning_rates(config: Sections) -> Iterator[str]:
    """Checks that each part with a learning rate of its own is trained."""
    vision = config.model.vision
    for key, rate in config.optimizer.lr_of_parts.items():
        name = f"freeze_{key.removesuffix('_lr')}"
        if vision is None:
            yield f"optimizer.{key}={rate} is for a model with model.vision, which is not set; set it, or remove {key}"
        elif getattr(vision, name):
            yield (
                f"optimizer.{key}={rate} has no effect with model.vision.{name}=true; set {name}=false, or remove {key}"
            )


def _frozen_language_model(vision: VisionSection, config: Sections) -> Iterator[str]:
    """Checks that something is trained besides a frozen language model, and that nothing moves a part of it."""
    key = "model.vision.freeze_language_model=true"
    if vision.is_frozen and config.adapter is None:
        yield (
            f"{key} leaves nothing to train, since the tower and the projector are frozen as well; set "
            "model.vision.freeze_projector=false or freeze_tower=false, or add an adapter"
        )
    if config.adapter is not None and config.adapter.modules_to_save:
        yield (
            f"adapter.modules_to_save={list(config.adapter.modules_to_save)} trains parts of the language model in "
            f"full, but {key} freezes all of it; remove one of them: adapters freeze the other parts without it"
        )
    experts = config.model.experts
    # adapters refuse it as well
    if config.adapter is None and experts is not None and experts.bias_update_rate > 0:
        yield (
            f"model.experts.bias_update_rate={experts.bias_update_rate} moves a part of the language model, but {key}; "
            "set bias_update_rate to 0"
        )


def _deepstack(num_deep: int, config: Sections) -> Iterator[str]:
    """Checks that the first pipeline stage has the layers after which features are added."""
    model, layout = config.model, config.layout
    if layout.stage_layers is not None:
        first = layout.stage_layers[0]
    elif layout.first_stage_layers is not None:
        first = layout.first_stage_layers
    else:
        first = model.num_layers // (layout.pp * layout.vpp)
    if first < num_deep:
        yield (
            f"model.vision.deepstack adds features after the first {counted(num_deep, 'layer')}, but the first "
            f"pipeline stage has {first}; lower layout.pp or layout.vpp, or set layout.first_stage_layers"
        )


def products_in_8_bits(config: Sections) -> Iterator[str]:
    """Checks sizes and options of `train.fp8`."""
    train = config.train
    if train.fp8 is None:
        if train.fp8_recipe is not None:
            yield (
                f"train.fp8_recipe={train.fp8_recipe} scales products in fp8, but train.fp8 is not set; set it to "
                "hybrid or e4m3"
            )
        return
    key = f"train.fp8={train.fp8}"
    if train.fp8_recipe == "delayed":
        yield (
            "train.fp8_recipe=delayed scales by the largest elements of earlier steps, which checkpoints do not "
            "contain, so a resumed run would differ; set it to tensorwise, blockwise or mxfp8"
        )
    yield from _own_products_in_8_bits(config, key) if config.has_own_fp8 else _its_products_in_8_bits(train, key)
    yield from _unaligned(config, key)


def _its_products_in_8_bits(train: TrainSection, key: str) -> Iterator[str]:
    """Checks options that TransformerEngine's layers cannot follow in 8 bits."""
    if train.fp8_recipe == "rowwise":
        yield (
            "train.fp8_recipe=rowwise is of our own layers; set model.backend=torch, or choose tensorwise, blockwise "
            "or mxfp8"
        )
    if train.device == "cpu":
        yield f"{key} needs a GPU, but train.device=cpu; set train.device=cuda, or remove train.fp8"
    if train.precision != "bf16":
        yield f"{key} computes everything but products in bf16, but train.precision={train.precision}; set it to bf16"
    left_out = {"compile": train.compile in COMPILED, "offload_layers": train.offload_layers is not None}
    for name in (name for name, holds in left_out.items() if holds):
        yield (
            f"{key} needs TransformerEngine's layers, which train.{name}={getattr(train, name)} excludes; remove one "
            "of the two"
        )


def _own_products_in_8_bits(config: Sections, key: str) -> Iterator[str]:
    """Checks options that our own layers cannot follow in 8 bits."""
    train, model = config.train, config.model
    if train.fp8_recipe in ("tensorwise", "mxfp8"):
        yield (
            f"train.fp8_recipe={train.fp8_recipe} needs TransformerEngine's layers, but model.backend=torch; choose "
            "rowwise or blockwise, whose scales no layout changes, or set model.backend=auto"
        )
    unable = {
        "train.precision=fp16": train.precision == "fp16",
        "train.compile=layers": train.compile == "layers",
        "adapter": config.adapter is not None,
        "model.delta_net": model.delta_net is not None,
        "model.layer_pattern": model.layer_pattern is not None,
        "model.global_attention": model.global_attention is not None,
    }
    for name in (name for name, holds in unable.items() if holds):
        yield f"{key} in our own layers (model.backend=torch) cannot be combined with {name}; remove one of the two"


def _unaligned(config: Sections, key: str) -> Iterator[str]:
    """Yields a message for each size on a rank that an 8-bit product does not support."""
    model, layout, train = config.model, config.layout, config.train
    columns, rows = _multiples(config.fp8_recipe)
    sizes = {
        "model.hidden_size": model.hidden_size,
        **sizes_of_attention(model, layout.tp),
        "model.ffn_hidden_size / layout.tp": model.ffn_hidden_size // layout.tp,
    }
    if model.experts is not None:
        if not config.has_own_fp8:  # ours multiply routed experts in the run's precision
            sizes["model.experts.ffn_hidden_size / layout.etp"] = model.experts.ffn_hidden_size // layout.etp
        sizes["model.experts.shared_ffn_hidden_size / layout.tp"] = model.experts.shared_ffn_hidden_size // layout.tp
    for name, size in sizes.items():
        if size % columns:
            yield (
                f"{key} needs {name}={size} to be a multiple of {columns}, as its kernels require; change it, "
                "or remove train.fp8"
            )
    tokens = train.micro_batch_size * config.row_width // layout.cp
    if tokens % rows and not config.has_own_fp8:  # ours add rows of zeros
        yield (
            f"{key} needs a multiple of {counted(rows, 'token')} in a rank's microbatch, but train.micro_batch_size x "
            f"row width / layout.cp={tokens}; change one of them, or remove train.fp8"
        )


def _multiples(recipe: Fp8Recipe) -> tuple[int, int]:
    """Returns the numbers that columns and tokens must be multiples of.

    Source: TransformerEngine 2.9, assert_dim_for_fp8_exec and the block sizes of its recipes.
    """
    match recipe:
        case "delayed" | "tensorwise" | "rowwise":
            return 16, 8
        case "mxfp8":
            return 32, 32
        case "blockwise":
            return 128, 128
        case _:
            assert_never(recipe)
