"""Builds this rank's part of the model, and runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, assert_never

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
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
from mtrain.core.layers.compiled import compile_layers
from mtrain.core.layers.init_weights import draw_weights
from mtrain.core.layers.language_model import LanguageModel, of_text
from mtrain.core.layers.layer_parts import Backend
from mtrain.core.layers.layer_spec import chosen_backend, only_by_transformer_engine
from mtrain.core.layers.offload.activations import move_activations
from mtrain.core.layers.output_layer import Logits
from mtrain.core.layers.swiglu import use_own_swiglu
from mtrain.core.layers.transformer_config import compute_in_float64, ddp_config, transformer_config
from mtrain.core.ranks.groups import Groups
from mtrain.core.ranks.init import any_rank


def build_model(
    config: Config, groups: Groups, weights_follow: bool = False, in_float64: bool = False
) -> list[DistributedDataParallel]:
    """Builds this rank's model chunks, one for each virtual stage, with layout-free initial weights, wrapped in DDP.

    Collective over the world where `train.compile` asks for compiled layers.

    Args:
        config: Configuration of the run.
        groups: Groups over which layers, tensors and experts are divided.
        weights_follow: Whether the caller loads weights, or draws them once it knows that there are none to load: until
            then they are nan.
        in_float64: Whether to compute in float64 what the configuration computes in float32. No optimizer applies
            such gradients.

    Raises:
        ConfigError: The backend is not available, or megatron-core refuses the configuration.
    """
    ddp = ddp_config(config, groups.layout)
    ddp.grad_reduce_in_fp32 = not in_float64  # else in the precision of the parameters
    translated, chunks = _build_chunks(config, groups, in_float64)
    for chunk in chunks:
        # before the wrapping: DistributedDataParallel moves parameters into its buffers and main weights copy those
        draw_weights(chunk, config, groups, others_follow=weights_follow)
    wrapped = [_wrap(config.train, ddp, translated, chunk, groups, index) for index, chunk in enumerate(chunks)]
    compile_layers(wrapped, config, groups)
    if config.train.offload_layers is not None:
        move_activations([unwrap(chunk).decoder for chunk in wrapped], config.train.offload_layers, groups.device)
    return wrapped


def build_adapters(base: Sequence[torch.nn.Module], config: Config, groups: Groups) -> list[DistributedDataParallel]:
    """Builds further adapters on this rank's chunks, whose own have been taken out, and wraps these anew.

    Args:
        base: The chunks.
        config: Configuration of the run, with the section of the new adapters.
        groups: Groups over which layers, tensors and experts are divided.
    """
    assert config.adapter is not None, "the caller wants adapters"
    # megatron-core's callbacks are kept in it: each set has gradients and an optimizer of its own
    translated = transformer_config(config, groups.layout, groups.device)
    chunks = [unwrap(chunk) for chunk in base]
    for chunk in chunks:
        attach(chunk, config.model, config.adapter, groups.collection)
    return [
        _wrap(config.train, ddp_config(config, groups.layout), translated, chunk, groups, index)
        for index, chunk in enumerate(chunks)
    ]


def let_go(chunks: Sequence[DistributedDataParallel]) -> None:
    """Lets the memory of chunks be freed, which nobody trains any more."""
    for chunk in chunks:
        # Nodes of autograd hold the chunk by their hooks. megatron-core keeps them here, and the distributed optimizer
        # by its views of parameters in fp32: cycles through C++, which Python's collector does not see.
        chunk.grad_accs.clear()
        get_model_config(chunk).grad_scale_func = None


def build_frozen_model(config: Config, groups: Groups, in_float64: bool = False) -> list[torch.nn.Module]:
    """Builds this rank's chunks of a model that only runs forward: no gradients, no dropout, weights still to be
    loaded.

    Args:
        config: Configuration of the model.
        groups: Groups over which layers, tensors and experts are divided.
        in_float64: See `build_model`.

    Raises:
        ConfigError: See `build_model`.
    """
    translated, chunks = _build_chunks(config, groups, in_float64)
    for chunk in chunks:
        chunk.looks_ahead = False  # a teacher's depths are loaded with the rest and never run
        chunk.replays = False  # batches name the student's experts
    # without DDP, whose gradient buffers would cost four bytes per parameter
    return [_in_precision(config.train, translated, chunk).eval().requires_grad_(False) for chunk in chunks]


def unwrap(chunk: torch.nn.Module) -> LanguageModel:
    """Returns the LanguageModel inside DDP and the half-precision wrapper."""
    inner: Any = chunk
    while not isinstance(inner, LanguageModel):  # which wrappers there are depends on precision and on DDP
        inner = inner.module
    return inner


def build_with(backend: Backend, config: Config, groups: Groups) -> torch.nn.Module:
    """Builds this rank's only chunk of layers that the caller chose, although a run may not take them: no DDP, weights
    still to be set.

    Raises:
        ConfigError: megatron-core refuses the configuration.
    """
    translated = transformer_config(config, groups.layout, groups.device)
    return _in_precision(config.train, translated, _build_chunk(config, translated, groups, None, backend))


def _build_chunks(config: Config, groups: Groups, in_float64: bool) -> tuple[TransformerConfig, list[LanguageModel]]:
    translated = transformer_config(config, groups.layout, groups.device)
    if in_float64:
        compute_in_float64(translated)
    stages: list[int | None] = [None] if groups.layout.vpp == 1 else list(range(groups.layout.vpp))
    backend = _agreed(chosen_backend(config, groups.device), config, groups)
    return translated, [_build_chunk(config, translated, groups, stage, backend) for stage in stages]


def _agreed(backend: Backend, config: Sections, groups: Groups) -> Backend:
    """Returns layers that all ranks take: certificates are files, which one node may have and another not.

    One all-reduce over the world where ranks of GPUs choose for themselves.

    Raises:
        ConfigError: A rank has to take TransformerEngine's layers, and another one cannot.
    """
    if (
        config.model.backend != "auto"
        or groups.device.type != "cuda"
        or not any_rank(backend == "torch", groups.device)
    ):
        return backend
    asked = only_by_transformer_engine(config)
    if backend == "te" and asked:
        raise ConfigError(
            f"{asked} needs TransformerEngine's layers on all ranks, but another rank cannot take them; give all nodes "
            f"the same packages and certificates (MTRAIN_CERTIFICATES), or remove {asked.split('=')[0]}"
        )
    return "torch"


def _build_chunk(
    config: Config, translated: TransformerConfig, groups: Groups, vp_stage: int | None, backend: Backend
) -> LanguageModel:
    is_narrow = holds_narrow(config.adapter, config.train.precision)
    if config.model.megatron.get(products.FIELD):
        products.install()
    with built_narrow(translated) if is_narrow else contextlib.nullcontext():
        model = LanguageModel(config.model, translated, backend, groups, vp_stage)
    if backend == "fla":
        take_delta_rule(model)
    use_own_swiglu(model)
    if config.adapter is not None:
        if is_narrow:
            widen_all_but_matrices(model, translated.params_dtype, learned_modules(model, config.model, config.adapter))
        attach(model, config.model, config.adapter, groups.collection)
    return model.to(groups.device)


def _wrap(
    train: TrainSection,
    ddp: DistributedDataParallelConfig,
    translated: TransformerConfig,
    chunk: LanguageModel,
    groups: Groups,
    index: int,
) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=translated,
        ddp_config=ddp,
        module=_in_precision(train, translated, chunk),
        disable_bucketing=index > 0,  # as in Megatron-LM: only the first chunk's gradients are reduced in buckets
        pg_collection=groups.collection,
    )


def _in_precision(train: TrainSection, translated: TransformerConfig, chunk: LanguageModel) -> torch.nn.Module:
    match train.precision:
        case "fp32":
            return chunk
        case "bf16" | "fp16":
            return Float16Module(translated, chunk)
        case _:
            assert_never(train.precision)


def run_chunk(chunk: torch.nn.Module, batch: Microbatch) -> Tensor | Logits:
    """Runs one stage on one microbatch, sliced for context parallelism; outputs stay in the precision of the run.

    Returns:
        The result of `LanguageModel.forward`.
    """
    is_half = isinstance(chunk, Float16Module) or isinstance(getattr(chunk, "module", None), Float16Module)
    options = {"fp32_output": False} if is_half else {}  # the loss upcasts what it needs
    ahead, routes = batch.mtp, batch.routed_experts
    given = (batch.tokens, batch.positions, batch.document_starts, _sequence_ids(batch), ahead, routes)
    output: Tensor | Logits = chunk(*given, **options)
    return output


def _sequence_ids(batch: Microbatch) -> Tensor | None:
    """Returns [batch, seq_local] int64: the sequence of each position, -1 where there is no text; None if unused."""
    if batch.is_padding is None:
        return None
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1).expand_as(batch.tokens)
    return of_text(rows if batch.sequence_ids is None else batch.sequence_ids, batch.is_padding)
