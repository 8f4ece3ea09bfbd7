"""What a family is: how its config.json reads, and where its tensors go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.config.model import ModelSection
from mtrain.hf.config import Entry, config_of, model_of
from mtrain.hf.table import Rule, Table, build_table


@dataclass(frozen=True)
class Family:
    """One family of models."""

    model_type: str
    """As config.json names it."""
    architecture: str
    """Class in transformers."""
    entries: tuple[Entry, ...]
    rules: tuple[Rule, ...]
    dropped: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """Tensors in files of old versions that follow from config.json."""

    def model(self, config: dict[str, Any]) -> ModelSection:
        """The architecture that a config.json describes.

        Raises:
            DataError: A field is missing, wrong or not supported.
        """
        return model_of(config, self.entries)

    def config(self, model: ModelSection, template: Mapping[str, Any] | None) -> dict[str, Any]:
        """A config.json that describes the model.

        Args:
            model: The architecture.
            template: The file that the weights came with; None where there is none.

        Raises:
            DataError: The family cannot describe this model.
        """
        start = {"architectures": [self.architecture], "model_type": self.model_type} if template is None else template
        return config_of(model, self.entries, start, template is not None)

    def table(self, model: ModelSection) -> Table:
        """Where each tensor of a model goes."""
        return build_table(self.rules, model, axis_sizes(model), stacks_layers(model))


def axis_sizes(model: ModelSection) -> dict[str, int]:
    """The axes that tables speak of.

    V vocabulary, h hidden, f feed-forward, H query heads, G query groups, s slots of a group (its queries, a key, a
    value), d dimensions of a head, c halves of a gated projection, L layers, E experts, e feed-forward of an expert.
    """
    sizes = {
        "V": model.vocab_size,
        "h": model.hidden_size,
        "f": model.ffn_hidden_size,
        "H": model.num_attention_heads,
        "G": model.query_groups,
        "s": model.num_attention_heads // model.query_groups + 2,
        "d": model.head_size,
        "c": 2,
        "L": model.num_layers,
    }
    if model.experts is not None:
        sizes |= {"E": model.experts.num_experts, "e": model.experts.ffn_hidden_size}
    return sizes


def stacks_layers(model: ModelSection) -> bool:
    """Whether a checkpoint keeps the layers in one tensor: where all are alike."""
    return model.experts is None
