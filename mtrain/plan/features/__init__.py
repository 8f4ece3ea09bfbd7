"""Features of models, each in one object; `docs/extending/model-feature.md` shows how one is added."""

from collections.abc import Iterable

from mtrain.config.schema.model import ModelSection
from mtrain.plan.features.attention import (
    AttentionSinks,
    FullWidthQkNorm,
    GroupedQueryAttention,
    QkNorm,
    SlidingWindow,
    UnturnedLayers,
)
from mtrain.plan.features.feature import Feature, LayerPart, SmallRun
from mtrain.plan.features.feed_forward import DenseFeedForward, ExpertFeedForward
from mtrain.plan.features.mla import MultiHeadLatentAttention
from mtrain.plan.features.mtp import MultiTokenPrediction
from mtrain.plan.features.norms import InputNorms, OutputNorms, Residual

LAYER_PARTS: tuple[LayerPart, ...] = (
    Residual(),
    InputNorms(),
    OutputNorms(),
    GroupedQueryAttention(),
    QkNorm(),
    FullWidthQkNorm(),
    AttentionSinks(),
    MultiHeadLatentAttention(),
    DenseFeedForward(),
    ExpertFeedForward(),
)
"""In the order in which `mtrain/mcore/model/layer_parts.py` puts a layer together."""


def alike(model: ModelSection, layers: Iterable[int]) -> dict[int, int]:
    """Layers of the same parts cost the same: one of each kind, and how many there are of it."""
    first: dict[tuple[bool, ...], int] = {}
    counts: dict[int, int] = {}
    for layer in layers:
        one = first.setdefault(tuple(part.is_in(model, layer) for part in LAYER_PARTS), layer)
        counts[one] = counts.get(one, 0) + 1
    return counts


FEATURES: tuple[Feature, ...] = (*LAYER_PARTS, SlidingWindow(), UnturnedLayers(), MultiTokenPrediction())

__all__ = [
    "FEATURES",
    "LAYER_PARTS",
    "AttentionSinks",
    "DenseFeedForward",
    "ExpertFeedForward",
    "Feature",
    "FullWidthQkNorm",
    "GroupedQueryAttention",
    "InputNorms",
    "LayerPart",
    "MultiHeadLatentAttention",
    "OutputNorms",
    "QkNorm",
    "Residual",
    "SmallRun",
    "alike",
]
