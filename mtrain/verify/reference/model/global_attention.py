"""Attention of the layers that see the whole row where they have heads of their own, whose keys are their values, too.

Source: Gemma 4 as released.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from mtrain.config.schema.attention import GlobalAttentionSection
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention_kind import (
    AttentionKind,
    KeySet,
    Shape,
    linear_shapes,
    norm_shapes,
    softmax,
)
from mtrain.verify.reference.model.grouped_attention import partly_rotated, rotates, unweighted_norm
from mtrain.verify.reference.model.modules import Module, linear, norm
from mtrain.verify.reference.text import Rows


@final
class GlobalAttention(AttentionKind):
    """Attention to all tokens before, with keys that give the values as well."""

    inputs = ("q_proj", "k_proj")

    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        heads, size, groups = model.num_attention_heads, *_sizes(model)
        yield from linear_shapes(f"{name}.linear_qk", (heads + groups) * size, model.hidden_size, False)
        if model.qk_norm:
            yield from norm_shapes(f"{name}.q_layernorm", size, model)
            yield from norm_shapes(f"{name}.k_layernorm", size, model)
        yield from linear_shapes(f"{name}.linear_proj", model.hidden_size, heads * size, False)

    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        model, (size, groups) = part.model, _sizes(part.model)
        joined = linear(part, "linear_qk", x).view(*x.shape[:2], groups, -1, size)
        query, key = joined[..., :-1, :], joined[..., -1, :]
        value = unweighted_norm(key, model) if model.value_norm else key
        if model.qk_norm:
            query, key = norm(part.inner("q_layernorm"), query), norm(part.inner("k_layernorm"), key)
        if rotates(model, layer):
            query = partly_rotated(query.flatten(2, 3), rows, model.rope).view(query.shape)
            key = partly_rotated(key, rows, model.rope)
        scale = 1 / math.sqrt(size if model.query_scalar is None else model.query_scalar)
        weights = softmax(torch.einsum("bqghd,bkgd->bghqk", query, key) * scale, KeySet(rows.documents), None)
        return torch.einsum("bghqk,bkgd->bqghd", weights, value).flatten(2)

    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        if linear == "linear_qk":
            return dict(zip(self.inputs, _apart(every, model), strict=True))
        return {"proj": every} if linear == "linear_proj" else None

    def matrices(self, linear: str, every: Tensor, model: ModelSection) -> list[Tensor] | None:
        return _apart(every, model) if linear == "linear_qk" else None


def _sizes(model: ModelSection) -> tuple[int, int]:
    """Returns the dimensions of a head and the number of keys."""
    section: GlobalAttentionSection | None = model.global_attention
    assert section is not None
    return section.head_dim, section.num_query_groups


def _apart(every: Tensor, model: ModelSection) -> list[Tensor]:
    size, groups = _sizes(model)
    heads = every.view(groups, -1, size)  # in each group queries, then the key
    return [heads[:, :-1].flatten(), heads[:, -1].flatten()]
