"""Features of a model, without torch.

A feature is one object that knows its contribution to the parameters, FLOPs and memory of a layer, and how to shrink
itself for verification. Sums go over all features, so a new feature is a new object, not a new case in many places.
`mtrain/core/layers/layer_parts.py` has the modules that compute a feature; `mtrain/config/schema/model.py` has its keys
and their rules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, assert_never

from mtrain.arch.layout import Layout
from mtrain.config.schema.adapter import AdapterSection
from mtrain.config.schema.model import ModelSection


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by the way in which ranks divide them."""

    divided: int = 0
    """Parameters that TP divides."""
    replicated: int = 0
    """Parameters that every TP rank holds whole."""
    experts: int = 0
    """Parameters of experts that EP divides, and ETP within each expert."""
    whole_experts: int = 0
    """Parameters of experts that EP divides, but every ETP rank holds whole."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.divided + other.divided,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.whole_experts + other.whole_experts,
        )

    def __mul__(self, times: int) -> Parameters:
        return Parameters(
            self.divided * times, self.replicated * times, self.experts * times, self.whole_experts * times
        )

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.divided + self.replicated + self.experts + self.whole_experts

    def on_rank(self, layout: Layout) -> RankParameters:
        """Returns the numbers of parameters that one rank holds."""
        experts = self.experts // (layout.ep * layout.etp) + self.whole_experts // layout.ep
        return RankParameters(dense=self.divided // layout.tp + self.replicated, experts=experts)


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Parameters replicated over DP x CP."""
    experts: int
    """Parameters replicated over the replicas of an expert."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.experts


EMBEDDING = "embedding.word_embeddings"


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix with a low-rank pair: a projection, or a part of a fused one."""

    linear: str
    """Name of its module within a layer; for a table, within the model."""
    part: str
    rows: int
    """Outputs: hidden size for the embedding, vocabulary size for `output`."""
    columns: int
    """Inputs; vocabulary size for the embedding."""
    is_row_parallel: bool = False
    """Whether TP divides its columns instead of its rows."""
    is_replicated: bool = False
    """Whether every TP rank holds the whole matrix."""
    num_experts: int = 0
    """Number of experts in a layer, each with such a matrix; 0 for a matrix outside experts."""
    num_chosen: int = 1
    """Number of such matrices that multiply one token."""

    def parameters(self, adapter: AdapterSection) -> Parameters:
        """Counts the parameters of the pair and of the magnitudes."""
        rank = adapter.rank_of(self.part)
        size_a, size_b = rank * self.columns, rank * self.rows
        if self.num_experts:
            return Parameters(experts=self.num_experts * (size_a + size_b))
        magnitudes = self.rows if adapter.has_magnitudes else 0
        if self.is_replicated:
            return Parameters(replicated=size_a + size_b + magnitudes)
        if self.is_row_parallel:
            return Parameters(divided=size_a, replicated=size_b + magnitudes)
        return Parameters(divided=size_b + magnitudes, replicated=size_a)

    def multiplied(self, adapter: AdapterSection) -> int:
        """Counts the elements of the pair that multiply one token; an embedding lookup multiplies none of A."""
        rank = adapter.rank_of(self.part)
        looked_up = rank * self.columns if self.linear == EMBEDDING else 0
        return self.num_chosen * rank * (self.rows + self.columns) - looked_up


SMALL_HEAD_DIM = 8
"""Dimensions of a head in shrunk models."""


T = TypeVar("T")
_MODELS_AT_ONCE = 8


def once_a_model(function: Callable[[ModelSection], T]) -> Callable[[ModelSection], T]:
    """Caches results of `function` for a few models: a search calls it thousands of times with the same model.

    Models are immutable and compared by identity, since comparing all keys would cost more than the cache saves.
    """
    cache: dict[int, tuple[ModelSection, T]] = {}

    @wraps(function)
    def cached(model: ModelSection) -> T:
        entry = cache.get(id(model))
        if entry is None:
            if len(cache) == _MODELS_AT_ONCE:
                cache.clear()
            entry = cache[id(model)] = model, function(model)  # the entry keeps the model alive, so its id stays unique
        return entry[1]

    return cached


@dataclass(frozen=True)
class SmallRun:
    """Sizes of the verification run for which a model is shrunk."""

    tp: int
    """Degree of TP; sizes that TP divides must be multiples of it. The same holds for `ep` and `etp`."""
    ep: int
    etp: int
    user_seq_length: int
    seq_length: int
    num_layers: int
    query_groups: int
    """Number of key/value heads, in the user's ratio to query heads."""
    head_dim: int | None
    """Dimensions of a head; None: the hidden size divided by the number of heads."""
    epsilon_factor: float = 1.0
    """Factor of the norms' epsilon."""


class Feature:
    """One feature of a model; contributions that a class does not define are zero."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        """Names the keys that TransformerEngine's layers lack, as the user writes them; None if they support all."""
        return None

    def needs_certificate(self, model: ModelSection) -> str | None:
        """Names the keys that TransformerEngine's layers support only with a certificate of `mtrain verify backend`;
        None if they need none."""
        return None

    def num_layers_at_least(self, model: ModelSection) -> int:
        """Returns the smallest number of layers that contains the feature's whole pattern."""
        return 1

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Returns key of `model.*` -> new value, such that the feature stays and its sizes become small."""
        return {}


class LayerPart(Feature, ABC):
    """A feature that all or some layers have."""

    @abstractmethod
    def is_in(self, model: ModelSection, layer: int) -> bool:
        """Says whether layer `layer`, counted from 0, has the part."""

    def is_anywhere(self, model: ModelSection) -> bool:
        """Says whether any layer has the part."""
        return any(self.is_in(model, layer) for layer in range(model.num_layers))

    def parameters(self, model: ModelSection) -> Parameters:
        """Counts the parameters that the part adds to a layer."""
        return self.matrices(model) + self.norms(model)

    def norms(self, model: ModelSection) -> Parameters:
        """Counts the parameters of norms, which `parameters` includes."""
        return Parameters()

    def matrices(self, model: ModelSection) -> Parameters:
        """Counts the parameters of projection matrices, without biases, norms and router rows."""
        return Parameters(divided=self.matrix_elements(model))

    def matrix_elements(self, model: ModelSection) -> int:
        """Counts the elements of matrices that multiply each token."""
        return 0

    def pair_products(self, model: ModelSection) -> int:
        """Counts the multiply-adds for each pair (query, key)."""
        return 0

    def state_products(self, model: ModelSection) -> int:
        """Counts the multiply-adds per token with the state of a recurrent layer."""
        return 0

    torch_only: str | None = None
    """Key, as the user writes it, that TransformerEngine's layers do not support if any layer has the part."""
    num_hidden_norms: int = 0
    """Number of norms over the hidden size that the part adds to a layer."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return self.torch_only if self.torch_only is not None and self.is_anywhere(model) else None

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements per token and rank that are saved for the backward pass."""
        return 0

    def inner_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements per token and rank between the projections of a feed-forward part."""
        return 0

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the widths of tensors among `kept_elements` that are at most about as wide as a hidden state; in
        short rows they are too small to move to the host."""
        return ()

    def module_elements(self, model: ModelSection, layout: Layout) -> dict[str, int]:
        """Returns module in train.recompute_modules -> the part of `kept_elements` between its input and output."""
        return {}

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Returns letter in the tables of `mtrain/hf/schema` -> size, for axes that only this part's tensors have."""
        return {}

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        """Yields the matrices that may have adapters, in the order of the forward pass."""
        return iter(())

    def spared_elements(self, model: ModelSection, layout: Layout, targets: frozenset[str], on_gpu: bool) -> int:
        """Counts the part of `kept_elements` that need not be saved if the weights are frozen and only these targets
        have adapters."""
        return 0

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of each fused matrix in the repeating block of a linear module's rows.

        The matrices are those that the model's paper and Hugging Face name.

        Args:
            num_rows: Rows of the module's weight, on a rank or in the whole model.

        Returns:
            Numbers of rows; empty if the module belongs to another part or is not fused.
        """
        return ()

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Counts the elements per token and rank that core attention saves in addition to `kept_elements`, unless it is
        recomputed."""
        return 0

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        """Counts the elements that a rank caches for a sequence of `length` tokens during generation: in the run's
        precision, and in float32."""
        return 0, 0

    def wide_core_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements as `core_elements` does, but those that are float32 in any precision."""
        return 0


def required(section: T | None) -> T:
    """Returns the section of a part; call it only for a model that has the part."""
    assert section is not None, "only called if a layer has the part"
    return section


def norm_elements(model: ModelSection, size: int) -> int:
    """Counts the parameters of a norm over `size` elements."""
    match model.norm:
        case "rmsnorm":
            return size
        case "layernorm":
            return 2 * size
        case _:
            assert_never(model.norm)


def hidden_local(model: ModelSection, layout: Layout) -> int:
    """Returns the elements per token and rank of hidden states between the parts of a layer."""
    return model.hidden_size // layout.tp if layout.sp else model.hidden_size


def multiple_from(least: int, divisors: Sequence[int]) -> int:
    """Returns the smallest common multiple of `divisors` that is at least `least`."""
    multiple = math.lcm(*divisors)
    return -(-least // multiple) * multiple
