"""The residual stream and its norms."""

from typing import final

from mtrain.arch.features.feature import LayerPart, Parameters, hidden_local, norm_elements
from mtrain.arch.layout import Layout
from mtrain.config.schema.model import ModelSection


class _Residual(LayerPart):
    """The residual stream before a sublayer."""

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return hidden_local(model, layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the width of the projection's input if no norm precedes it."""
        return (hidden_local(model, layout),) if model.post_norm else ()


@final
class AttentionResidual(_Residual):
    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.attention(layer) != "none"


@final
class FeedForwardResidual(_Residual):
    """The residual stream before the feed-forward part."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.has_feed_forward(layer)


class _InputNorm(LayerPart):
    num_hidden_norms = 1

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=norm_elements(model, model.hidden_size))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return hidden_local(model, layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the width of the norm's output; the residual stream counts its input."""
        return (hidden_local(model, layout),)


@final
class AttentionNorm(_InputNorm):
    def is_in(self, model: ModelSection, layer: int) -> bool:
        return not model.post_norm and model.attention(layer) != "none"


@final
class FeedForwardNorm(_InputNorm):
    """A norm before the feed-forward part."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return not model.post_norm and model.has_feed_forward(layer) and not model.has_branches(layer)


@final
class OutputNorms(LayerPart):
    """Norms after attention and the feed-forward part, before the residual is added."""

    num_hidden_norms = 2

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.sandwich_norm or model.post_norm

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        if model.post_norm:
            return "model.post_norm=true"
        return "model.sandwich_norm=true" if model.sandwich_norm else None

    def norms(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=2 * norm_elements(model, model.hidden_size))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return 2 * hidden_local(model, layout)
