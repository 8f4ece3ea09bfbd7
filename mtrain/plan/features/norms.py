"""Norms of the residual stream, and the residual stream itself."""

from __future__ import annotations

from typing import final

from mtrain.config.schema.model import ModelSection
from mtrain.plan.features.feature import LayerPart, Parameters, hidden_local, norm_elements
from mtrain.plan.layout import Layout


@final
class Residual(LayerPart):
    """The residual stream in front of attention and of the feed-forward part."""

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return True

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return 2 * hidden_local(model, layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the widths of the projections' inputs where no norm precedes them."""
        return (hidden_local(model, layout),) * 2 if model.post_norm else ()


@final
class InputNorms(LayerPart):
    """A norm in front of attention and one in front of the feed-forward part."""

    num_hidden_norms = 2

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return not model.post_norm

    def parameters(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=2 * norm_elements(model, model.hidden_size))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return 2 * hidden_local(model, layout)

    def narrow_tensors(self, model: ModelSection, layout: Layout) -> tuple[int, ...]:
        """Returns the widths of the outputs; inputs are the residual stream, which is counted there."""
        return (hidden_local(model, layout),) * 2


@final
class OutputNorms(LayerPart):
    """A norm after attention and one after the feed-forward part, before the residual is added."""

    num_hidden_norms = 2

    def is_in(self, model: ModelSection, layer: int) -> bool:
        return model.sandwich_norm or model.post_norm

    def needs_torch_layers(self, model: ModelSection) -> str | None:
        if model.post_norm:
            return "model.post_norm=true"
        return "model.sandwich_norm=true" if model.sandwich_norm else None

    def parameters(self, model: ModelSection) -> Parameters:
        return Parameters(replicated=2 * norm_elements(model, model.hidden_size))

    def kept_elements(self, model: ModelSection, layout: Layout) -> int:
        return 2 * hidden_local(model, layout)
