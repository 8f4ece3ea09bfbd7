"""Features of models, one object each; `docs/extending/model-feature.md` shows how to add one."""

from collections import Counter
from collections.abc import Iterable

from mtrain.arch.features.attention import (
    AttentionGate,
    AttentionSinks,
    AttentionTemperature,
    FullWidthQkNorm,
    GroupedQueryAttention,
    QkNorm,
    SlidingWindow,
    UnrotatedLayers,
)
from mtrain.arch.features.delta_net import GatedDeltaNet
from mtrain.arch.features.feature import Feature, LayerPart, SmallRun, once_a_model
from mtrain.arch.features.feed_forward import BranchNorms, DenseFeedForward, ExpertFeedForward
from mtrain.arch.features.global_attention import GlobalAttention, LayerScalar, ValueNorm
from mtrain.arch.features.mamba import Mamba, OneSublayer
from mtrain.arch.features.mla import MultiHeadLatentAttention
from mtrain.arch.features.norms import (
    AttentionNorm,
    AttentionResidual,
    FeedForwardNorm,
    FeedForwardResidual,
    OutputNorms,
)
from mtrain.arch.features.outside import MultiTokenPrediction, Vision
from mtrain.config.schema.model import ModelSection

LAYER_PARTS: tuple[LayerPart, ...] = (
    AttentionResidual(),
    FeedForwardResidual(),
    AttentionNorm(),
    FeedForwardNorm(),
    OutputNorms(),
    LayerScalar(),
    GroupedQueryAttention(),
    GlobalAttention(),
    QkNorm(),
    FullWidthQkNorm(),
    AttentionGate(),
    AttentionTemperature(),
    ValueNorm(),
    AttentionSinks(),
    MultiHeadLatentAttention(),
    GatedDeltaNet(),
    Mamba(),
    DenseFeedForward(),
    ExpertFeedForward(),
    BranchNorms(),
)
"""Parts of a layer, in the order in which `mtrain/core/layers/layer_parts.py` assembles it."""


def alike(model: ModelSection, layers: Iterable[int]) -> dict[int, int]:
    """Returns one layer of each kind -> number of layers with the same parts and therefore the same cost."""
    return Counter(map(kinds(model).__getitem__, layers))


@once_a_model
def kinds(model: ModelSection) -> tuple[int, ...]:
    """Returns, for each layer, the first layer that has the same parts."""
    first: dict[tuple[bool, ...], int] = {}
    layers = range(model.num_layers)
    return tuple(first.setdefault(tuple(part.is_in(model, layer) for part in LAYER_PARTS), layer) for layer in layers)


@once_a_model
def present(model: ModelSection) -> tuple[LayerPart, ...]:
    """Returns the parts that at least one layer has."""
    return tuple(part for part in LAYER_PARTS if part.is_anywhere(model))


def segments(model: ModelSection, linear: str, num_rows: int) -> tuple[int, ...]:
    """Returns the rows of each fused matrix in the repeating block of a linear module's rows; all rows of an unfused
    module.

    Args:
        num_rows: Rows of the module's weight, on a rank or in the whole model.
    """
    rows = (part.segments(model, linear, num_rows) for part in present(model))
    return next(filter(None, rows), (num_rows,))


FEATURES: tuple[Feature, ...] = (
    *LAYER_PARTS,
    SlidingWindow(),
    UnrotatedLayers(),
    OneSublayer(),
    MultiTokenPrediction(),
    Vision(),
)

__all__ = [
    "FEATURES",
    "LAYER_PARTS",
    "AttentionGate",
    "AttentionNorm",
    "AttentionResidual",
    "AttentionSinks",
    "AttentionTemperature",
    "BranchNorms",
    "DenseFeedForward",
    "ExpertFeedForward",
    "Feature",
    "FeedForwardNorm",
    "FeedForwardResidual",
    "FullWidthQkNorm",
    "GatedDeltaNet",
    "GlobalAttention",
    "GroupedQueryAttention",
    "LayerPart",
    "LayerScalar",
    "Mamba",
    "MultiHeadLatentAttention",
    "OutputNorms",
    "QkNorm",
    "SmallRun",
    "ValueNorm",
    "alike",
    "kinds",
    "present",
    "segments",
]
