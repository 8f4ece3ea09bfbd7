"""Features of models, each in one object; `docs/extending/model-feature.md` shows how one is added."""

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
]
