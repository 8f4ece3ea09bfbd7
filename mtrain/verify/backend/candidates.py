"""Candidates: other builds of a run's layers, each compared with our torch layers."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from mtrain.base.errors import MachineError, MtrainError
from mtrain.config import Config
from mtrain.config.messages import in_one_line
from mtrain.config.schema.sections import Sections
from mtrain.config.schema.train import Compiled
from mtrain.core.layers.attention import flash_linear_attention
from mtrain.core.layers.attention.core_attention import CoreAttention
from mtrain.core.layers.attention.key_set import key_set
from mtrain.core.layers.build import build_with, unwrap
from mtrain.core.layers.compiled import compile_layers, try_compiler
from mtrain.core.layers.fp8 import lacking
from mtrain.core.layers.layer_spec import absent, unbuildable
from mtrain.core.layers.norm import Norm
from mtrain.core.layers.products import widened
from mtrain.core.ranks.groups import Groups

_MAX_HEAD = 256
"""Largest head size of flash-attn's kernels."""


def torch_layers(config: Config, groups: Groups) -> nn.Module:
    """Builds our own layers of a configuration from `few_layers` on this rank, without weights and without fp8."""
    train = config.train.model_copy(update={"fp8": None, "fp8_recipe": None})
    return build_with("torch", config.model_copy(update={"train": train}), groups)


def _joined(reasons: Iterable[str]) -> str | None:
    return "; ".join(reasons) or None


def _with_flash_attention(config: Config, groups: Groups) -> nn.Module:
    chunk, attend = torch_layers(config, groups), importlib.import_module("flash_attn").flash_attn_varlen_func
    for module in chunk.modules():
        if isinstance(module, CoreAttention):
            module.forward = partial(_attended, module, attend)  # type: ignore[method-assign]
    return chunk


def _attended(
    core: CoreAttention, attend: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, **options: Any
) -> Tensor:
    """Computes attention as `CoreAttention.forward` does, on concatenated rows."""
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
        # flash-attn counts the keys before the query's own
        window_size=(-1, -1) if core.window is None else (core.window - 1, 0),
    )
    return output.reshape(batch, seq, -1).transpose(0, 1)


def without_flash_attention(config: Sections, device: torch.device) -> str | None:
    """Returns why flash-attn cannot compute the attention of these layers; None if it can."""
    model = config.model
    reasons = {
        "there is no GPU": device.type != "cuda",
        "flash-attn is not installed": find_spec("flash_attn") is None,
        "its kernels have no float32": config.train.precision == "fp32",
        "train.fp8 is compared alone": config.train.fp8 is not None,
        "it does not support sinks": model.attention_sinks,
        f"its heads have at most {_MAX_HEAD} dimensions": model.head_size > _MAX_HEAD,
        "context parallelism exchanges keys and values around our attention": config.layout.cp > 1,
        "no layer has our attention of whole heads": all(
            model.attention(layer) != "grouped" for layer in range(model.num_layers)
        ),
    }
    return _joined(reason for reason, holds in reasons.items() if holds)


def _with_apex_norms(config: Config, groups: Groups) -> nn.Module:
    chunk, kernels = torch_layers(config, groups), importlib.import_module("apex.normalization.fused_layer_norm")
    for module in chunk.modules():
        if isinstance(module, Norm):
            module.forward = partial(_normalised, module, kernels)  # type: ignore[method-assign]
    return chunk


def _normalised(norm: Norm, kernels: Any, hidden: Tensor) -> Tensor:
    inputs: Tensor = hidden
    weight: Tensor = norm.weight
    bias: Tensor | None = norm.bias
    if norm.is_zero_centered:
        inputs, weight = widened(hidden), 1.0 + widened(norm.weight)
        bias = None if bias is None else widened(bias)
    if bias is None:
        output: Tensor = kernels.fused_rms_norm_affine(inputs, weight, weight.shape, norm.epsilon)
    else:
        output = kernels.fused_layer_norm_affine(inputs, weight, bias, weight.shape, norm.epsilon)
    return output.to(hidden.dtype)


def without_apex(config: Sections, device: torch.device) -> str | None:
    """Returns why apex cannot compute the norms of these layers; None if it can."""
    reasons = {
        "there is no GPU": device.type != "cuda",
        "apex is not installed": find_spec("apex") is None,
        "train.fp8 is compared alone": config.train.fp8 is not None,
    }
    return _joined(reason for reason, holds in reasons.items() if holds)


def _with_its_experts(config: Config, groups: Groups) -> nn.Module:
    return build_with("te", _its_experts(config), groups)


def _without_its_experts(config: Config, device: torch.device) -> str | None:
    if config.model.experts is None:
        return "the model has no experts"
    return _without_transformer_engine(_its_experts(config), device)


def _its_experts(config: Config) -> Config:
    assert config.model.experts is not None
    experts = config.model.experts.model_copy(update={"implementation": "te"})
    return config.model_copy(update={"model": config.model.model_copy(update={"experts": experts})})


def _without_transformer_engine(config: Sections, device: torch.device) -> str | None:
    return _joined([*absent(device), *unbuildable(config)])


def _compiled(choice: Compiled, config: Config, groups: Groups) -> nn.Module:
    chunk = torch_layers(config, groups)
    compile_layers([chunk], _with_compilation(config, choice), groups)
    return chunk


def _without_compiler(choice: Compiled, config: Config, device: torch.device) -> str | None:
    if config.train.fp8 is not None:
        return "train.fp8 is compared alone"
    try:
        Config.model_validate(_with_compilation(config, choice).model_dump())
        try_compiler(device, choice)
    except ValidationError as error:
        return in_one_line(error)
    except (MachineError, MtrainError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _with_compilation(config: Config, choice: Compiled) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": choice})})


def _without_delta_rule(config: Sections, device: torch.device) -> str | None:
    return _joined(flash_linear_attention.lacking(device) + flash_linear_attention.unable(config))


def _without_gradient(config: Config, groups: Groups) -> nn.Module:
    chunk = torch_layers(config, groups)
    for layer in unwrap(chunk).decoder.layers:
        layer.self_attention.linear_proj.weight.requires_grad_(False)
    return chunk


def _never(config: Config, device: torch.device) -> None:
    return None


@dataclass(frozen=True)
class Candidate:
    """One build of the layers; ranks find its functions by name."""

    name: str
    build: Callable[[Config, Groups], nn.Module]
    """Builds a rank's chunk in the run's precision, without weights."""
    absent: Callable[[Config, torch.device], str | None] = _never
    """Returns why the layers cannot be built here; None if they can."""


CANDIDATES = (
    Candidate("te", partial(build_with, "te"), _without_transformer_engine),
    Candidate("te-experts", _with_its_experts, _without_its_experts),
    Candidate("fp8", partial(build_with, "torch"), lacking),
    Candidate("regions", partial(_compiled, "regions"), partial(_without_compiler, "regions")),
    Candidate("compile", partial(_compiled, "layers"), partial(_without_compiler, "layers")),
    Candidate("flash-attn", _with_flash_attention, without_flash_attention),
    Candidate("fla", partial(build_with, "fla"), _without_delta_rule),
    Candidate("apex", _with_apex_norms, without_apex),
)
MISSING_GRADIENT = Candidate("missing-gradient", _without_gradient)
NO_CANDIDATES = {"mamba-ssm": "the scan of model.mamba is always ours, in torch"}
"""Packages that no layer uses, with the reason."""
