"""What TransformerEngine documents that its modules compute, in torch, in place of their compiled parts; tp = 1 alone.

It shows that layers put its modules together as they should. How its kernels round, only a GPU shows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Output = Tensor | tuple[Tensor, Any]


def install() -> None:
    """Gives TransformerEngine's modules a forward pass; call it after its stand-in is installed."""
    from transformer_engine import pytorch as te  # type: ignore[import-not-found]

    te.Linear.forward = _linear
    te.LayerNormLinear.forward = _norm_and_linear
    te.RMSNorm.forward = te.LayerNorm.forward = _norm
    te.GroupedLinear.forward = _grouped_linear
    te.DotProductAttention.forward = attend


def _linear(module: Any, inputs: Tensor, is_first_microbatch: bool | None = None) -> Output:
    assert module.tp_size == 1
    return _projected(module, inputs)


def _projected(module: Any, inputs: Tensor) -> Output:
    assert inputs.dtype == module.weight.dtype
    output = functional.linear(inputs, module.weight, module.bias if module.apply_bias else None)
    return (output, module.bias) if module.return_bias else output


def _norm_and_linear(module: Any, inputs: Tensor, is_first_microbatch: bool | None = None) -> Output:
    assert module.tp_size == 1
    bias = module.layer_norm_bias if module.normalization == "LayerNorm" else None
    return _projected(module, _normalized(module, inputs, module.layer_norm_weight, bias))


def _norm(module: Any, inputs: Tensor) -> Tensor:
    return _normalized(module, inputs, module.weight, getattr(module, "bias", None))


def _normalized(module: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scale = weight.float() + (1 if module.zero_centered_gamma else 0)
    if bias is not None:
        return functional.layer_norm(inputs.float(), scale.shape, scale, bias.float(), module.eps).to(inputs.dtype)
    return functional.rms_norm(inputs.float(), scale.shape, scale, module.eps).to(inputs.dtype)


def _grouped_linear(
    module: Any, inputs: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
) -> Output:
    assert module.tp_size == 1
    assert len(m_splits) == module.num_gemms
    weights, biases = ([getattr(module, f"{kind}{i}") for i in range(len(m_splits))] for kind in ("weight", "bias"))
    parts = zip(torch.split(inputs, m_splits), weights, biases, strict=True)
    output = torch.cat(
        [functional.linear(part, weight, bias if module.apply_bias else None) for part, weight, bias in parts]
    )
    return (output, biases) if module.return_bias else output


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Tensor:
    """Attends causally: rows [seq, batch, heads, dim], or documents one after the other [tokens, heads, dim]."""
    if options.get("qkv_format") == "thd":
        assert (mask, options["attn_mask_type"]) == (None, "padding_causal")
        ends = options["cu_seqlens_q"].tolist()
        assert ends == options["cu_seqlens_kv"].tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        assert max(lengths) == options["max_seqlen_q"] == options["max_seqlen_kv"]
        documents = zip(*(torch.split(part, lengths) for part in (query, key, value)), strict=True)
        return torch.cat([_attended(module, *parts) for parts in documents]).flatten(1)
    assert (mask, options["attn_mask_type"]) == (None, "causal")
    rows = zip(*(part.unbind(1) for part in (query, key, value)), strict=True)
    return torch.stack([_attended(module, *parts) for parts in rows], dim=1).flatten(2)


def _attended(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends inside one document, [tokens, heads, dim]."""
    left, right = module.window_size
    assert right in (0, -1)  # -1: its causal mask has not been turned into a window
    places = torch.arange(len(query))
    distance = places[:, None] - places
    seen = (distance >= 0) & ((distance <= left) | (left < 0))
    queries, keys, values = (part.transpose(0, 1) for part in (query, key, value))
    scale = module.flash_attention.softmax_scale
    output = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=len(keys) < len(queries)
    )
    return output.transpose(0, 1)
