"""Our layers with a kernel of another library in one place: flash-attn's attention, apex's norms.

No run takes them: what they would bring is what the comparison says.
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.config.schema.sections import Sections
from mtrain.mcore.model.attention.context_parallel import CoreAttention, document_runs
from mtrain.mcore.model.attention.documents import pieces_of, segments_of
from mtrain.mcore.model.norm import Norm

_MAX_HEAD = 256
"""Largest head of flash-attn's kernels."""


def use_flash_attention(chunk: nn.Module) -> None:
    """Makes the core attention of a chunk's layers that of flash-attn."""
    attend = importlib.import_module("flash_attn").flash_attn_varlen_func
    for module in chunk.modules():
        if isinstance(module, CoreAttention):
            module.forward = partial(_attended, module, attend)  # type: ignore[method-assign]


def _attended(
    core: CoreAttention, attend: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, **options: Any
) -> Tensor:
    """Attends as `CoreAttention.forward` does, on rows one after the other."""
    seq, batch = query.shape[:2]
    of_rows = torch.zeros(batch, seq, dtype=torch.int32) if starts is None else starts
    pieces = tuple(tuple(pieces_of([(0, seq)], row)) for row in document_runs(of_rows))
    segments = segments_of(pieces, seq, query.device)
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
    """Says why flash-attn cannot attend in these layers; None where it can."""
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
    """Makes all norms of a chunk those of apex."""
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
    """Says why apex cannot normalize in these layers; None where it can."""
    reasons = {
        "there is no GPU": device.type != "cuda",
        "apex is not installed": find_spec("apex") is None,
        "train.fp8 needs TransformerEngine's layers": config.train.fp8 is not None,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None
