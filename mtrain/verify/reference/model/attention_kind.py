"""Interface of a kind of attention in the reference, and functions that several kinds share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.modules import Module
from mtrain.verify.reference.text import Rows

Shape: TypeAlias = tuple[int, ...]


class AttentionKind(ABC):
    """Kind of self-attention: its tensors, forward pass, adapters, and matrices for Muon."""

    inputs: tuple[str, ...]
    """Parts of the projections that read the hidden states."""
    group: str = "qkv"
    """Name of all `inputs` together in adapter.targets."""

    @abstractmethod
    def shapes(self, name: str, model: ModelSection) -> Iterator[tuple[str, Shape]]:
        """Yields name and shape of every tensor of the module called `name`, in the order of the forward pass."""

    @abstractmethod
    def context(self, part: Module, layer: int, x: Tensor, rows: Rows) -> Tensor:
        """Returns the weighted values of all heads of layer `layer` (from 0), concatenated, [batch, seq, heads x size].

        `x` has the normed hidden states, [batch, seq, hidden].
        """

    def projected(self, part: Module, x: Tensor, context: Tensor) -> Tensor:
        """Returns the output without a bias, [batch, seq, hidden], from hidden states and the result of `context`."""
        return context @ part.tensor("linear_proj.weight").T

    @abstractmethod
    def adapted(self, linear: str, every: Tensor, model: ModelSection) -> Mapping[str, Tensor] | None:
        """Splits all rows (`every`) of the projection `linear` by part; None if this kind has no such projection."""

    def matrices(self, linear: str, every: Tensor, model: ModelSection) -> list[Tensor]:
        """Returns the rows of each matrix that Muon orthogonalizes; by default each part is one matrix."""
        parts = self.adapted(linear, every, model)
        return [every] if parts is None else list(parts.values())


@dataclass(frozen=True)
class KeySet:
    """Keys that a query sees: in its document, not after it unless in its image, and less than `window` before it."""

    documents: Tensor
    """[batch, seq] number of each token's document."""
    window: int | None = None
    """None: all earlier keys."""
    images: Tensor | None = None
    """[batch, seq] number of each token's image in its row, -1 for text; None: no token sees a later one."""

    def seen(self) -> Tensor:
        """Returns [batch, query, key] bool."""
        positions = torch.arange(self.documents.shape[1], device=self.documents.device)
        distance = positions[:, None] - positions[None]
        ahead = distance < 0
        near = distance < (len(positions) if self.window is None else self.window)
        if self.images is None:
            near = near & ~ahead
        else:
            same = (self.images[:, :, None] == self.images[:, None, :]) & (self.images >= 0)[:, :, None]
            near = near & (~ahead | same)
        return near & (self.documents[:, :, None] == self.documents[:, None, :])


def softmax(scores: Tensor, keys: KeySet, sinks: Tensor | None) -> Tensor:
    """Returns attention weights, [batch, groups, heads, query, key]; a sink is an additional logit without a value."""
    hidden = scores.masked_fill(~keys.seen()[:, None, None], -math.inf)
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
