"""A feature of a model, as far as it needs no torch.

A feature is one object with its contribution to the parameters, arithmetic and memory of a layer, and the way to shrink
it for verification. Sums ask every feature, so a new feature is a new object, not a new case in many places.
`mtrain/core/layers/layer_parts.py` has the modules that compute it; `mtrain/config/schema/model.py` its keys and their
rules.
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
    """Numbers of parameters, by how ranks hold them."""

    divided: int = 0
    """Divided over the ranks of a TP group."""
    replicated: int = 0
    """Held whole by every rank."""
    experts: int = 0
    """Parameters of experts, divided over EP, and each expert over ETP."""
    whole_experts: int = 0
    """Parameters of experts, divided over EP, but whole on every rank of ETP."""

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
        """Parameters of all kinds."""
        return self.divided + self.replicated + self.experts + self.whole_experts

    def on_rank(self, layout: Layout) -> RankParameters:
        """Counts the parameters that one rank holds."""
        experts = self.experts // (layout.ep * layout.etp) + self.whole_experts // layout.ep
        return RankParameters(dense=self.divided // layout.tp + self.replicated, experts=experts)


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Parameters that are copied over DP x CP."""
    experts: int
    """Parameters that are copied over the replicas of an expert."""

    @property
    def total(self) -> int:
        """Parameters of both kinds."""
        return self.dense + self.experts


EMBEDDING = "embedding.word_embeddings"


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix with a low-rank pair: a projection, or a part of a fused one."""

    linear: str
    """Module that holds it, named within a layer; for a table, within the model."""
    part: str
    rows: int
    """Outputs: hidden size for the embedding, vocabulary size for `output`."""
    columns: int
    """Inputs; vocabulary size for the embedding."""
    is_row_parallel: bool = False
    """Whether TP divides its columns instead of its rows."""
    is_replicated: bool = False
    """Whether every rank of TP holds all of it."""
    num_experts: int = 0
    """Matrices of this size in a layer, one per expert; 0 for a matrix outside experts."""
    num_chosen: int = 1
    """Matrices of this size that multiply one token."""

    def parameters(self, adapter: AdapterSection) -> Parameters:
        """Counts the parameters of the pair and of the magnitudes."""
        rank = adapter.rank_of(self.part)
        of_a, of_b = rank * self.columns, rank * self.rows
        if self.num_experts:
            return Parameters(experts=self.num_experts * (of_a + of_b))
        magnitudes = self.rows if adapter.has_magnitudes else 0
        if self.is_replicated:
            return Parameters(replicated=of_a + of_b + magnitudes)
        if self.is_row_parallel:
            return Parameters(divided=of_a, replicated=of_b + magnitudes)
        return Parameters(divided=of_b + magnitudes, replicated=of_a)

    def multiplied(self, adapter: AdapterSection) -> int:
        """Counts the elements of the pair that multiply one token."""
        rank = adapter.rank_of(self.part)
        looked_up = rank * self.columns if self.linear == EMBEDDING else 0
        return self.num_chosen * rank * (self.rows + self.columns) - looked_up


SMALL_HEAD_DIM = 8
"""Dimensions of a head in models that are made small."""


T = TypeVar("T")
_MODELS_AT_ONCE = 8


def once_a_model(function: Callable[[ModelSection], T]) -> Callable[[ModelSection], T]:
    """Caches the result of `function` for the last models: a search asks about the same model thousands of times.

    Models are immutable and compared by identity; comparing all keys would cost more than is saved.
    """
    kept: dict[int, tuple[ModelSection, T]] = {}

    @wraps(function)
    def asked(model: ModelSection) -> T:
        found = kept.get(id(model))
        if found is None:
            if len(kept) == _MODELS_AT_ONCE:
                kept.clear()
            found = kept[id(model)] = model, function(model)  # holds the model, so no other one gets its id
        return found[1]

    return asked


@dataclass(frozen=True)
class SmallRun:
    """Sizes of the verification run that a model is shrunk for."""

    tp: int
    """Degree of TP; every size that TP divides must be a multiple of it. The same holds for `ep` and `etp`."""
    ep: int
    etp: int
    user_seq_length: int
    seq_length: int
    num_layers: int
    query_groups: int
    """Key/value heads, in the user's ratio to query heads."""
    head_dim: int | None
    """Dimensions of a head; None if it is the hidden size divided by the number of heads."""
    epsilon_factor: float = 1.0
    """Factor of what norms add to a mean square."""


class Feature:
    """One feature of a model; contributions that it does not define are zero."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        """Names the keys, as a user writes them, that TransformerEngine's layers cannot follow; None if there are
        none."""
        return None

    def needs_certificate(self, model: ModelSection) -> str | None:
        """Names the keys that TransformerEngine's layers follow only with a certificate of `mtrain verify backend`."""
        return None

    def num_layers_at_least(self, model: ModelSection) -> int:
        """Returns the fewest layers that contain every part of its pattern."""
        return 1

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Returns the changed keys of `model.*` that keep the feature and make its sizes small."""
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
        """Counts the parameters of norms, which are among `parameters`."""
        return Parameters()

    def matrices(self, model: ModelSection) -> Parameters:
        """Counts the parameters of projection matrices, without biases, norms and router rows."""
        return Parameters(divided=self.matrix_elements(model))

    def matrix_elements(self, model: ModelSection) -> int:
        """Counts the elements of matrices that multiply each token."""
        return 0

    def pair_products(self, model: ModelSection) -> int:
        """Counts the multiply-adds for each pair of a token and one that it attends to."""
        return 0

    def state_products(self, model: ModelSection) -> int:
        """Counts the multiply-adds of each token with a state that a layer carries from token to token."""
        return 0

    torch_only: str | None = None
    """Key, as a user writes it, that TransformerEngine's layers cannot follow where a layer has the part."""
    num_hidden_norms: int = 0
    """Norms over the hidden size that the part adds to a layer."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        return self.torch_only if self.torch_only is not None and self.is_anywhere(model) else None

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements per token and rank that backward needs."""
        return 0

    def inner_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts the elements per token and rank between the projections of a feed-forward part."""
        return 0

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the widths of tensors among `kept_elements` that are at most about as wide as a hidden state: in
        short rows they are too small to move to the host."""
        return ()

    def module_elements(self, model: ModelSection, layout: Layout) -> dict[str, int]:
        """Counts the part of `kept_elements` that a module keeps between input and output, by its name in
        train.recompute_modules."""
        return {}

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Returns the sizes of axes that only this part's tensors have, by their letters in the tables of
        `mtrain/hf/schema`."""
        return {}

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        """Yields the matrices that may have adapters, in the order of the forward pass."""
        return iter(())

    def spared_elements(self, model: ModelSection, layout: Layout, targets: frozenset[str], on_gpu: bool) -> int:
        """Counts the part of `kept_elements` that backward does not need if only these targets are trained and the
        weights are frozen."""
        return 0

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Returns the rows of each matrix that a linear module fuses, within the block that its rows repeat.

        The matrices are those of the model, as its papers and Hugging Face name them.

        Args:
            num_rows: Rows of the module's weight, on a rank or in the whole model.

        Returns:
            Numbers of rows; empty if the module belongs to another part or holds one matrix.
        """
        return ()

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Counts the elements per token and rank that core attention keeps in addition to `kept_elements`, unless
        recomputed."""
        return 0

    def remembered(self, model: ModelSection, layout: Layout, length: int) -> tuple[int, int]:
        """Counts the elements that a rank keeps of a sequence of `length` tokens while it generates: in the precision
        of the run, and in float32."""
        return 0, 0

    def wide_core_elements(self, model: ModelSection, layout: Layout) -> int:
        """Counts, like `core_elements`, those that are float32 in any precision."""
        return 0


def required(section: T | None) -> T:
    """Returns the section of a part, which a model has where a layer has the part."""
    assert section is not None, "asked only where a layer has it"
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
    """Counts the elements per token and rank of hidden states between the parts of a layer."""
    return model.hidden_size // layout.tp if layout.sp else model.hidden_size


def multiple_from(least: int, divisors: Sequence[int]) -> int:
    """Returns the smallest common multiple of the divisors that is at least `least`."""
    multiple = math.lcm(*divisors)
    return -(-least // multiple) * multiple
