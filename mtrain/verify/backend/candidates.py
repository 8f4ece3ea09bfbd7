"""Candidates: other builds of a run's layers, each compared with our torch layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.base.errors import MachineError, MtrainError
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.core.layers.attention import flash_linear_attention
from mtrain.core.layers.attention.core_attention import CoreAttention
from mtrain.core.layers.attention.key_set import key_set
from mtrain.core.layers.build import build_with, unwrap
from mtrain.core.layers.compiled import compile_layers, try_compiler
from mtrain.core.layers.layer_spec import absent, unbuildable
from mtrain.core.layers.norm import Norm
from mtrain.core.ranks.groups import Groups

_MAX_HEAD = 256
"""Largest head size of flash-attn's kernels."""


def use_flash_attention(chunk: nn.Module) -> None:
    """Replaces the core attention of a chunk's layers by flash-attn's."""
    attend = importlib.import_module("flash_attn").flash_attn_varlen_func
    for module in chunk.modules():
        if isinstance(module, CoreAttention):
            module.forward = partial(_attended, module, attend)  # type: ignore[method-assign]


def _attended(
    core: CoreAttention, attend: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, **options: Any
) -> Tensor:
    """Attends as `CoreAttention.forward`, on concatenated rows."""
    seq, batch = query.shape[:2]
    of_rows = torch.zeros(batch, seq, dtype=torch.int32) if starts is None else starts
    segments = key_set(of_rows, core.window).segments([(0, seq)], seq, query.device)
    output: Tensor = attend(
        *(part.transpose(0, 1).flatten(0, 1) for part in (query, key, value)),
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        softmax_scale=core.scale,
        causal=True,
        # it counts the keys before the query's own
        window_size=(-1, -1) if core.window is None else (core.window - 1, 0),
    )
    return output.reshape(batch, seq, -1).transpose(0, 1)


def without_flash_attention(config: Sections, device: torch.device) -> str | None:
    """Says why flash-attn cannot attend in these layers; None if it can."""
    model = config.model
    reasons = {
        "there is no GPU": device.type != "cuda",
        "flash-attn is not installed": find_spec("flash_attn") is None,
        "its kernels have no float32": config.train.precision == "fp32",
        "train.fp8 needs TransformerEngine's layers": config.train.fp8 is not None,
        "it has no sinks": model.attention_sinks,
        f"its heads have at most {_MAX_HEAD} numbers": model.head_size > _MAX_HEAD,
        "context parallelism exchanges keys and values around our attention": config.layout.cp > 1,
        "no layer has our attention of whole heads": all(
            model.attention(layer) != "grouped" for layer in range(model.num_layers)
        ),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


def use_apex_norms(chunk: nn.Module) -> None:
    """Replaces all norms of a chunk by apex's."""
    kernels = importlib.import_module("apex.normalization.fused_layer_norm")
    for module in chunk.modules():
        if isinstance(module, Norm):
            module._normalised = partial(_normalised, module, kernels)  # type: ignore[method-assign]


def _normalised(norm: Norm, kernels: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if norm.is_layer_norm:
        output: Tensor = kernels.fused_layer_norm_affine(hidden, weight, bias, norm.size, norm.epsilon)
    else:
        output = kernels.fused_rms_norm_affine(hidden, weight, norm.size, norm.epsilon)
    return output


def without_apex(config: Sections, device: torch.device) -> str | None:
    """Says why apex cannot normalize in these layers; None if it can."""
    reasons = {
        "there is no GPU": device.type != "cuda",
        "apex is not installed": find_spec("apex") is None,
        "train.fp8 needs TransformerEngine's layers": config.train.fp8 is not None,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


@dataclass(frozen=True)
class Place:
    """Configuration and ranks of the layers."""

    config: Config
    groups: Groups


def _never(place: Place) -> str | None:
    return None


@dataclass(frozen=True)
class Candidate:
    """One build of the layers; ranks find its functions by name."""

    name: str
    title: str
    build: Callable[[Place], nn.Module]
    """Builds a rank's chunk in the run's precision, without weights."""
    absent: Callable[[Place], str | None] = _never
    """Says why the layers cannot be built here; None if they can."""


def torch_layers(place: Place) -> nn.Module:
    """Builds our own layers."""
    return build_with("torch", place.config, place.groups)


def _transformer_engine(place: Place) -> nn.Module:
    return build_with("te", place.config, place.groups)


def _with_its_experts(place: Place) -> nn.Module:
    return build_with("te", _with_implementation(place).config, place.groups)


def _without_its_experts(place: Place) -> str | None:
    if place.config.model.experts is None:
        return "the model has no experts"
    return _without_transformer_engine(_with_implementation(place))


def _with_implementation(place: Place) -> Place:
    config = place.config
    assert config.model.experts is not None
    experts = config.model.experts.model_copy(update={"implementation": "te"})
    model = config.model.model_copy(update={"experts": experts})
    return Place(config.model_copy(update={"model": model}), place.groups)


def _without_transformer_engine(place: Place) -> str | None:
    return "; ".join((*absent(place.groups.device), *unbuildable(place.config))) or None


def _compiled(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    compile_layers([chunk], _with_compilation(place), place.groups)
    return chunk


def _without_compiler(place: Place) -> str | None:
    if place.config.train.fp8 is not None:
        return "train.fp8 needs TransformerEngine's layers, and torch.compile compiles ours"
    try:
        Config.model_validate(_with_compilation(place).model_dump())
        try_compiler(place.groups.device)
    except (MachineError, MtrainError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _with_compilation(place: Place) -> Config:
    config = place.config
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": "layers"})})


def _by_flash_attention(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    use_flash_attention(chunk)
    return chunk


def _without_flash_attention(place: Place) -> str | None:
    return without_flash_attention(place.config, place.groups.device)


def _by_delta_rule(place: Place) -> nn.Module:
    return build_with("fla", place.config, place.groups)


def _without_delta_rule(place: Place) -> str | None:
    reasons = flash_linear_attention.lacking(place.groups.device) + flash_linear_attention.unable(place.config)
    return "; ".join(reasons) or None


def _by_apex(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    use_apex_norms(chunk)
    return chunk


def _without_apex(place: Place) -> str | None:
    return without_apex(place.config, place.groups.device)


def _without_gradient(place: Place) -> nn.Module:
    chunk = torch_layers(place)
    for layer in unwrap(chunk).decoder.layers:
        layer.self_attention.linear_proj.weight.requires_grad_(False)
    return chunk


CANDIDATES = (
    Candidate("te", "TransformerEngine", _transformer_engine, _without_transformer_engine),
    Candidate("te-experts", "TransformerEngine, experts as well", _with_its_experts, _without_its_experts),
    Candidate("compile", "torch.compile (train.compile=layers)", _compiled, _without_compiler),
    Candidate("flash-attn", "our layers with flash-attn's attention", _by_flash_attention, _without_flash_attention),
    Candidate("fla", "our layers with flash-linear-attention's delta rule", _by_delta_rule, _without_delta_rule),
    Candidate("apex", "our layers with apex's norms", _by_apex, _without_apex),
)
MISSING_GRADIENT = Candidate("missing-gradient", "a gradient is missing", _without_gradient)
NO_CANDIDATES = {"mamba-ssm": "the scan of model.mamba is ours alone, in torch"}
"""Packages that no layer uses, with the reason."""
