"""What a kind of attention is to the reference, and what several kinds share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.modules import Module
from mtrain.verify.reference.text import Rows

Shape: TypeAlias = tuple[int, ...]


class AttentionKind(ABC):
    """One kind of self-attention, whole: its tensors, its forward pass, its adapters and its matrices for Muon."""

    inputs: tuple[str, ...]
    """Parts that adapter.targets=qkv stands for."""

    @abstractmethod
    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        """Yields name and shape of every tensor of the module called `name`, in the order of the forward pass."""

    @abstractmethod
    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        """Values under the attention's weights, all heads in a row: [batch, seq, heads x size].

        Args:
            part: Module of the attention.
            layer: Number of the layer, from 0.
            x: Normed hidden states, [batch, seq, hidden].
            rows: Tokens of the batch.
        """

    @abstractmethod
    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        """Part of a projection -> its rows; None where `linear` is no projection of this kind.

        Args:
            linear: The projection's own name.
            every: Numbers of all its rows.
            model: The architecture.
        """

    @abstractmethod
    def matrices(self, linear: str, every: Tensor, model: ModelSection) -> list[Tensor] | None:
        """Rows of each matrix that Muon makes orthogonal; None where the projection is one. Arguments: as `adapted`."""


def visible(rows: Rows, window: int | None) -> Tensor:
    """[batch, query, key] bool: the same document, not after the query, and less than `window` tokens before it."""
    places = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    distance = places[:, None] - places[None]
    near = (distance >= 0) & (distance < (len(places) if window is None else window))
    return near & (rows.documents[:, :, None] == rows.documents[:, None, :])


def softmax(scores: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of [batch, groups, heads, query, key]; a sink is one more logit of a head, which no value belongs to."""
    hidden = scores.masked_fill(~seen[:, None, None], -math.inf)
    if sinks is None:
        return hidden.softmax(-1)
    column = sinks[None, :, :, None, None].expand(*hidden.shape[:-1], 1)
    return torch.cat([hidden, column], dim=-1).softmax(-1)[..., :-1]


def norm_shapes(name: str, size: int, model: ModelSection) -> Iterator[tuple[str, Shape]]:
    """Yields the tensors of a norm over `size` elements."""
    yield f"{name}.weight", (size,)
    if model.norm == "layernorm":
        yield f"{name}.bias", (size,)


def linear_shapes(name: str, rows: int, columns: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    """Yields the tensors of a projection."""
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)
