"""Builds and runs this rank's part of the model."""

import contextlib
from typing import Any, assert_never

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mtrain.arch.adapters import holds_narrow
from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import TrainSection
from mtrain.core.batch.batch import Microbatch
from mtrain.core.layers import products
from mtrain.core.layers.adapters.attach import attach, learned_modules
from mtrain.core.layers.adapters.narrow import built_narrow, widen_all_but_matrices
from mtrain.core.layers.attention.flash_linear_attention import take_delta_rule
from mtrain.core.layers.divided_weights import divide_weights, matrices_without_memory
from mtrain.core.layers.fp8 import use_fp8
from mtrain.core.layers.language_model import LanguageModel
from mtrain.core.layers.layer_parts import Backend
from mtrain.core.layers.layer_spec import chosen_backend, only_by_transformer_engine
from mtrain.core.layers.output_layer import Logits
from mtrain.core.layers.swiglu import use_own_swiglu
from mtrain.core.layers.transformer_config import compute_in_float64, transformer_config
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import any_rank


def build_frozen_model(config: Config, groups: Groups, in_float64: bool = False) -> list[torch.nn.Module]:
    """Builds chunks like `build_chunks`, for a model that only runs forward, without gradients and dropout."""
    translated, chunks = build_chunks(config, groups, in_float64)
    for chunk in chunks:
        chunk.looks_ahead = False  # MTP depths of a teacher are loaded but never run
        chunk.replays = False  # the choices in a batch are those of the student
    # without DDP, whose gradient buffers would cost four bytes per parameter
    frozen = [in_precision(config.train, translated, chunk).eval().requires_grad_(False) for chunk in chunks]
    if groups.layout.shard == "weights":
        for chunk in chunks:
            divide_weights(chunk, groups, translated.params_dtype)
    return frozen


def unwrap(chunk: torch.nn.Module) -> LanguageModel:
    """Returns the LanguageModel inside DDP and the half-precision wrapper, if present."""
    inner: Any = chunk
    while not isinstance(inner, LanguageModel):
        inner = inner.module
    return inner


def build_with(backend: Backend, config: Config, groups: Groups) -> torch.nn.Module:
    """Builds this rank's only chunk with the given backend, without weights and DDP.

    Raises:
        ConfigError: megatron-core refuses the configuration.
    """
    translated = transformer_config(config, groups.layout, groups.device)
    translated.gradient_accumulation_fusion = False  # no buffers to add to
    return in_precision(config.train, translated, _build_chunk(config, translated, groups, None, backend))


def build_chunks(
    config: Config, groups: Groups, in_float64: bool = False
) -> tuple[TransformerConfig, list[LanguageModel]]:
    """Builds this rank's model chunks, one per virtual stage; weights must still be drawn or loaded, and with
    layout.shard=weights be divided before.

    `in_float64` makes a float32 configuration compute in float64, for references without an optimizer.

    Raises:
        ConfigError: The backend is not available, or megatron-core refuses the configuration.
    """
    translated = transformer_config(config, groups.layout, groups.device)
    stages: list[int | None] = [None] if groups.layout.vpp == 1 else list(range(groups.layout.vpp))
    backend = _agreed(chosen_backend(config, groups.device), config, groups)
    has_buffers = groups.layout.shard == "optimizer"
    translated.gradient_accumulation_fusion = has_buffers and backend != "te" and config.fuses_weight_gradients
    if in_float64:
        compute_in_float64(translated)
    with matrices_without_memory() if groups.layout.shard == "weights" else contextlib.nullcontext():
        chunks = [_build_chunk(config, translated, groups, stage, backend) for stage in stages]
    if config.model.has_frozen_language_model and config.adapter is None:  # adapters freeze it themselves
        for name, parameter in (each for chunk in chunks for each in chunk.named_parameters()):
            if not name.startswith("vision."):
                parameter.requires_grad_(False)
    return translated, chunks


def _agreed(backend: Backend, config: Sections, groups: Groups) -> Backend:
    """Returns the backend that all ranks use, since certificates are files, which may be missing on some nodes.

    One all-reduce over the world if backend is auto on GPUs. Raises ConfigError if one rank must use
    TransformerEngine's layers but another cannot.
    """
    if (
        config.model.backend != "auto"
        or groups.device.type != "cuda"
        or not any_rank(backend == "torch", groups.device)
    ):
        return backend
    required_key = only_by_transformer_engine(config)
    if backend == "te" and required_key:
        raise ConfigError(
            f"{required_key} needs TransformerEngine's layers on all ranks, but another rank cannot use them; give all "
            f"nodes the same packages and certificates (MTRAIN_CERTIFICATES), or remove {required_key.split('=')[0]}"
        )
    return "torch"


def _build_chunk(
    config: Config, translated: TransformerConfig, groups: Groups, vp_stage: int | None, backend: Backend
) -> LanguageModel:
    is_narrow = holds_narrow(config.adapter, config.train.precision)
    if translated.gradient_accumulation_fusion:
        products.install()
    with built_narrow(translated) if is_narrow else contextlib.nullcontext():
        model = LanguageModel(config.model, translated, backend, groups, vp_stage)
    if backend == "fla":
        take_delta_rule(model)
    use_own_swiglu(model)
    use_fp8(model, config, groups.device)
    if config.adapter is not None:
        if is_narrow:
            widen_all_but_matrices(model, translated.params_dtype, learned_modules(model, config.model, config.adapter))
        attach(model, config.model, config.adapter, groups.collection)
    return model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(groups.device))


def in_precision(train: TrainSection, translated: TransformerConfig, chunk: LanguageModel) -> torch.nn.Module:
    """Wraps a chunk in half precision to convert its inputs; float32 needs no wrapper."""
    match train.precision:
        case "fp32":
            return chunk
        case "bf16" | "fp16":
            return Float16Module(translated, chunk)
        case _:
            assert_never(train.precision)


def run_chunk(chunk: torch.nn.Module, batch: Microbatch) -> Tensor | Logits:
    """Runs `LanguageModel.forward` on a microbatch sliced for CP; outputs stay in the precision of the run."""
    is_half = isinstance(chunk, Float16Module) or isinstance(getattr(chunk, "module", None), Float16Module)
    options = {"fp32_output": False} if is_half else {}  # the loss itself upcasts
    return chunk(batch, **options)
