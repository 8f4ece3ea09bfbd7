"""The depth of Qwen3.5 that predicts a token further ahead, joined from modules of transformers as vLLM joins them.

Source: vLLM 0.11, models/qwen3_next_mtp.py, and v1/spec_decode/eagle.py for images: a depth reads the features of an
image in the place of embeddings, one token earlier, at the positions of the hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.config.schema.model import ModelSection
from tests.hf.megatron_names import from_huggingface

_OWN = {
    "mtp.pre_fc_norm_embedding.": "mtp.layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "mtp.layers.0.hnorm.",
    "mtp.fc.": "mtp.layers.0.eh_proj.",
    "mtp.norm.": "mtp.layers.0.final_layernorm.",
}
"""Prefixes of the names of a folder, and ours, outside the layer."""
_LAYER = "mtp.layers.0."


class Ahead(nn.Module):
    """A depth with the names that a folder has under `mtp.`."""

    def __init__(self, text: Any) -> None:
        """Makes a depth like the last layer of transformers' text model, with weights to be drawn."""
        super().__init__()
        width = text.config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([copy.deepcopy(text.layers[-1])])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (copy.deepcopy(text.norm) for _ in range(3))

    def forward(self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the normed hidden states, [1, n, hidden], from inputs of this shape: embeddings of the token after
        each position, and the model's normed hidden states there; `angles` are cosines and sines of the positions."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        n = hidden.shape[1]
        mask = torch.full((1, 1, n, n), -torch.inf, dtype=hidden.dtype).triu(1)
        output = self.layers[0](self.fc(both), position_embeddings=angles, attention_mask=mask)
        normed: Tensor = self.norm(output[0] if isinstance(output, tuple) else output)
        return normed


def of_class(kind: Any) -> Callable[[Any], Any]:
    """Returns a function that makes a model of this class of transformers, with a depth, from a configuration."""

    def made(config: Any) -> Any:
        model = kind(config)
        model.mtp = Ahead(model.model.language_model)
        return model

    return made


def both_logits(model: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns logits of the next token, [n, vocab], and of the token after it, [n - 1, vocab], for one sample."""
    inputs: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []

    def remember(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs.append((args[0], options["position_embeddings"]))

    handle = model.model.language_model.layers[0].register_forward_pre_hook(remember, with_kwargs=True)
    hidden = model.model(**given).last_hidden_state
    handle.remove()
    ((embedded, (cosines, sines)),) = inputs
    # the last position has no token two ahead
    ahead = model.mtp(embedded[:, 1:], hidden[:, :-1], (cosines[:, :-1], sines[:, :-1]))
    return model.lm_head(hidden)[0], model.lm_head(ahead)[0]


def parameters(state: Mapping[str, Tensor], model: ModelSection) -> dict[str, Tensor]:
    """Returns the parameters of a language model, and of its depth if it has one, by our names."""
    state = {name.replace("model.language_model.", "model."): value for name, value in state.items()}
    found = from_huggingface(state, model)
    if not model.mtp_depths:
        return found
    found |= {
        ours + name.removeprefix(theirs): value.detach().clone()
        for theirs, ours in _OWN.items()
        for name, value in state.items()
        if name.startswith(theirs)
    }
    # the layer is read like one more layer of the model
    number = model.num_layers
    longer = {name.replace(_LAYER, f"model.layers.{number}."): value for name, value in state.items()}
    layers = from_huggingface(longer, model.model_copy(update={"num_layers": number + 1}))
    prefix = f"decoder.layers.{number}."
    return found | {
        f"{_LAYER}transformer_layer.{name.removeprefix(prefix)}": value
        for name, value in layers.items()
        if name.startswith(prefix)
    }
