"""Layer specs: the module in each place of megatron-core's transformer."""

from __future__ import annotations

from typing import assert_never

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mtrain.base.errors import ConfigError
from mtrain.base.imports import faulty_gpu_packages
from mtrain.config.known_issues import beyond_transformer_engine
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.sections import Sections
from mtrain.mcore.model.layer_parts import FUSED_NAMES, Backend, layer_spec
from mtrain.mcore.model.norm import Norm
from mtrain.plan.features import FEATURES

_STACKED_EXPERTS = "mlp.experts.experts."
"""Part of the keys of tensors with an axis of all experts."""


def global_name(key: str, places: tuple[int, ...]) -> str:
    """Returns the name of a parameter in the whole model, the same for every layout and both backends.

    Args:
        key: Checkpoint key: TransformerEngine's names, with layers stacked (no number) or spelled out.
        places: Indices along the stacked axes: the layer, then the expert; empty where the key is complete.
    """
    key = canonical_name(key)
    if _STACKED_EXPERTS in key:
        # the expert's axis is the last of the stacked ones; a key with its layer spelled out has no other
        key, places = key.replace(_STACKED_EXPERTS, f"mlp.experts.{places[-1]}."), places[:-1]
    return key.replace(".layers.", f".layers.{places[0]}.", 1) if places else key


def canonical_name(key: str) -> str:
    """Returns a checkpoint key with norms named like the modules of the local spec."""
    for ours, theirs in FUSED_NAMES.items():
        key = key.replace(theirs, ours)
    return key


def has_transformer_engine() -> bool:
    """Says whether TransformerEngine can be imported, by megatron-core's own check."""
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def unbuildable(config: Sections, device: torch.device) -> list[str]:
    """Lists what keeps a run from TransformerEngine's layers; none where they can do the work.

    TransformerEngine cuts packed rows by document, ours by row, so rows of documents need the torch spec. It also fuses
    norms into the projections after them, whose inputs an adapter has to read.
    """
    fault = faulty_gpu_packages().get("transformer_engine")
    reasons = {
        "there is no GPU": device.type != "cuda",
        f"transformer_engine cannot be used ({fault or 'it is not installed'})": not has_transformer_engine(),
        "documents in rows (data.isolate_documents, data.packing) need torch layers": config.data.isolate_documents,
        "adapter needs the torch backend": config.adapter is not None,
    }
    unmet = [reason for reason, holds in reasons.items() if holds]
    ours = (feature.needs_torch_layers(config.model) for feature in FEATURES)
    unmet += [f"{keys} needs the torch backend" for keys in ours if keys is not None]
    return [*unmet, *beyond_transformer_engine(config)]


def chosen_backend(config: Sections, device: torch.device) -> Backend:
    """Resolves `model.backend`: `auto` means te where it is importable, a GPU is present and it supports the work.

    Raises:
        ConfigError: `te`, or fp8, was asked for where it cannot run.
    """
    model, unmet = config.model, unbuildable(config, device)
    match model.backend:
        case "torch":
            return "torch"
        case "te":
            if unmet:
                raise ConfigError(f"model.backend=te cannot be used: {'; '.join(unmet)}; use model.backend=auto")
            return "te"
        case "auto":
            if unmet and config.train.fp8 is not None:
                raise ConfigError(
                    f"train.fp8={config.train.fp8} needs TransformerEngine's layers, which cannot be used: "
                    f"{'; '.join(unmet)}; remove train.fp8"
                )
            return "torch" if unmet else "te"
        case _:
            assert_never(model.backend)


def block_spec(model: ModelSection, backend: Backend, layers: range) -> TransformerBlockSubmodules | ModuleSpec:
    """Builds the spec of a stage's transformer block.

    Args:
        model: Section of the architecture.
        backend: Backend from `chosen_backend`.
        layers: Global numbers, from 0, of the layers that the stage holds.
    """
    match backend:
        case "te":
            return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=model.qk_norm)
        case "torch":
            layer_specs = [layer_spec(model, layer) for layer in layers]
            return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=Norm)
        case _:
            assert_never(backend)
