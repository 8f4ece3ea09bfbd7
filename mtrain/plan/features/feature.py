"""What a feature of a model is, wherever no torch is needed.

A feature is one object: what it adds to the parameters, to the arithmetic and to the memory of a layer, and how it is
made small for verification. Whoever needs a sum asks every feature, so a new one is a new object and not a new case in
each of these. Its other half, the modules that compute it, has an entry in `mtrain/mcore/model/layer_parts.py`. Its
keys and the rules between them stand in `mtrain/config/schema/model.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, assert_never

from mtrain.config.schema.model import ModelSection
from mtrain.plan.counts import Parameters
from mtrain.plan.features.adapted import AdaptedMatrix
from mtrain.plan.layout import Layout

SMALL_HEAD_DIM = 8
"""Dimensions of a head in models that are made small."""


T = TypeVar("T")
_MODELS_AT_ONCE = 8


def once_a_model(function: Callable[[ModelSection], T]) -> Callable[[ModelSection], T]:
    """Keeps what `function` says of each of the last models: a search asks the same one thousands of times.

    A model never changes, and is known here as the same object: comparing all its keys would cost more than is saved.
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
    """What a model is made small for."""

    tp: int
    """Every size that TP divides must be a multiple of this; likewise for `ep` and `etp`."""
    ep: int
    etp: int
    user_seq_length: int
    seq_length: int
    num_layers: int
    query_groups: int
    """Key/value heads, in the user's ratio to query heads."""
    head_dim: int | None
    """None where heads are as wide as the hidden size divided by their number."""


class Feature:
    """One feature of a model; what it does not say costs nothing."""

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        """The keys that TransformerEngine's layers cannot follow, as a user writes them; None where there are none."""
        return None

    def num_layers_at_least(self, model: ModelSection) -> int:
        """Layers below which a part of its pattern would be missing."""
        return 1

    def shrunk(self, model: ModelSection, small: SmallRun) -> dict[str, Any]:
        """Keys of `model.*` that change so that the feature stays and its sizes become small."""
        return {}


class LayerPart(Feature, ABC):
    """A feature that all layers have, or some."""

    @abstractmethod
    def is_in(self, model: ModelSection, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has it."""

    def is_anywhere(self, model: ModelSection) -> bool:
        """Whether some layer has it."""
        return any(self.is_in(model, layer) for layer in range(model.num_layers))

    def parameters(self, model: ModelSection) -> Parameters:
        """What it adds to a layer that has it."""
        return self.matrices(model)

    def matrices(self, model: ModelSection) -> Parameters:
        """Of its parameters, the matrices of projections: without biases, norms and the rows of a router."""
        return Parameters()

    def matrix_elements(self, model: ModelSection) -> int:
        """Elements of matrices that each token is multiplied by."""
        return 0

    def pair_products(self, model: ModelSection) -> int:
        """Multiply-adds for each pair of tokens of which one attends to the other."""
        return 0

    num_hidden_norms: int = 0
    """Norms over the hidden size that it adds to a layer."""

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        """Elements a token and rank that the backward pass needs."""
        return 0

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Of `kept_elements`, those of each tensor about as wide as a hidden state, or narrower: in short rows they are
        too small to be worth moving to the host."""
        return ()

    def module_elements(self, model: ModelSection, layout: Layout) -> dict[str, int]:
        """Of `kept_elements`, those that a module keeps between its input and its output, by its name in
        train.recompute_modules."""
        return {}

    def axes(self, model: ModelSection) -> dict[str, int]:
        """Sizes of the axes that only its tensors have, by their letters in the tables of `mtrain/hf/schema`."""
        return {}

    def adapted(self, model: ModelSection) -> Iterator[AdaptedMatrix]:
        """The matrices that may have adapters, in the order of the forward pass."""
        return iter(())

    def spared_elements(self, model: ModelSection, layout: Layout, targets: frozenset[str], on_gpu: bool) -> int:
        """Of `kept_elements`, those that backward does not need where only these targets learn, and the weights are
        frozen."""
        return 0

    def segments(self, model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
        """Rows of each matrix that a linear module fuses, within the block that its rows repeat.

        The matrices are those of the model, as its papers and Hugging Face have them.

        Args:
            model: The architecture.
            linear: The module's own name.
            num_rows: Rows of the module's weight, on a rank or in the whole model.

        Returns:
            Numbers of rows; none where the module is another part's or holds one matrix.
        """
        return ()

    def core_elements(self, model: ModelSection, layout: Layout, on_gpu: bool) -> int:
        """Elements a token and rank beside `kept_elements` that core attention keeps where it is not recomputed."""
        return 0


def norm_elements(model: ModelSection, size: int) -> int:
    """Parameters of a norm over so many elements."""
    match model.norm:
        case "rmsnorm":
            return size
        case "layernorm":
            return 2 * size
        case _:
            assert_never(model.norm)


def hidden_local(model: ModelSection, layout: Layout) -> int:
    """Elements a token and rank of what stands between the parts of a layer."""
    return model.hidden_size // layout.tp if layout.sp else model.hidden_size


def multiple_from(least: int, divisors: Sequence[int]) -> int:
    """The smallest number from `least` on that all divisors divide."""
    multiple = math.lcm(*divisors)
    return -(-least // multiple) * multiple
