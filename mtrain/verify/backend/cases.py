"""The compared layers: one of each kind in the user's model, on rows of the same kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain.arch.features import kinds
from mtrain.config import Config
from mtrain.config.schema.sections import Sections
from mtrain.verify.reference.model.grouped_attention import rotates, window_of
from mtrain.verify.reference.text import Rows, Text, rows_of

MAX_LENGTH = 1024
"""Longest rows for measuring errors: the reference keeps the scores of all pairs in float64."""
NUM_ROWS = 2
_EDGES = (0.13, 0.37, 0.38, 0.81)
"""Ends of documents as shares of a row; they come a little later in each row than in the one before."""


@dataclass(frozen=True)
class Case:
    """One kind of layer."""

    layer: int
    """First layer of the kind, counted from 0."""
    num_layers: int
    """Layers of the kind in the user's model."""
    features: tuple[str, ...]
    """Features in words, such as `window 1024`."""

    @property
    def name(self) -> str:
        """Returns the layer and its features in words."""
        return ", ".join((f"layer {self.layer}", *self.features))


def cases_of(config: Sections) -> tuple[Case, ...]:
    """Returns the kinds of layers of the model, with documents if the data have them."""
    model = config.model
    layers_by_kind: dict[tuple[Any, ...], list[int]] = {}
    for layer, kind in enumerate(kinds(model)):
        layers_by_kind.setdefault((kind, window_of(model, layer), rotates(model, layer)), []).append(layer)
    return tuple(Case(layers[0], len(layers), _features(config, layers[0])) for layers in layers_by_kind.values())


def _features(config: Sections, layer: int) -> tuple[str, ...]:
    model, train, layout = config.model, config.train, config.layout
    window = window_of(model, layer)
    features = {
        "delta net": model.attention(layer) == "delta_net",
        "latent attention": model.attention(layer) == "latent",
        f"window {window}": window is not None,
        "sinks": model.attention_sinks,
        "experts": model.has_experts(layer),
        "documents": config.data.isolate_documents,
        f"adapters ({'' if config.adapter is None else config.adapter.kind})": config.adapter is not None,
        f"cp{layout.cp} {layout.cp_comm}": layout.cp > 1,
        f"fp8 {train.fp8} {config.fp8_recipe}": train.fp8 is not None,
    }
    return tuple(name for name, holds in features.items() if holds)


def few_layers(config: Sections, length: int) -> Config:
    """Returns the configuration with the fewest layers that show all kinds, on rows of this length.

    Sizes, precision and kind of context parallelism are the user's. Dropped: dropout, which every library draws
    differently; recomputation and offloading, which change no result; other parallelism, which splits the same layers.
    A window as long as the rows is shortened, so that it hides something.
    """
    model = config.model
    num_layers = max(case.layer for case in cases_of(config)) + 1
    experts = None if model.experts is None else model.experts.model_dump()
    if experts is not None and model.has_transformer_engine_experts:
        experts["implementation"] = "auto"  # a candidate of its own
    megatron = dict(model.megatron)
    if "no_rope_freq" in megatron:
        megatron["no_rope_freq"] = [int(not rotates(model, layer)) for layer in range(num_layers)]
    changed: dict[str, Mapping[str, Any]] = {
        "model": {
            "hf": None,
            "backend": "torch" if config.has_own_fp8 else "auto",
            "num_layers": num_layers,
            "layer_pattern": model.layer_pattern and model.layer_pattern[:num_layers],
            "vocab_size": 8,
            "vocab_multiple": 1,
            "num_labels": None,
            "mtp_depths": 0,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "sliding_window": None if model.sliding_window is None else min(model.sliding_window, max(2, length // 3)),
            "megatron": megatron,
            "experts": experts,
        },
        "layout": {"cp": config.layout.cp, "cp_comm": config.layout.cp_comm},
        "train": {
            "global_batch_size": NUM_ROWS,
            "micro_batch_size": NUM_ROWS,
            "tokens_per_micro_batch": None,
            "compile": "none",
            "recompute": "none",
            "recompute_modules": None,
            "recompute_layers": None,
            "offload_layers": None,
        },
        "data": {"kind": "mock", "seq_length": length, "isolate_documents": config.data.isolate_documents},
    }
    content = config.model_dump() | {name: {} for name in ("loss", "valid", "eval", "checkpoint", "metrics")}
    for section in ("model", "train"):
        content[section] |= changed[section]
    return Config.model_validate(content | {name: changed[name] for name in ("layout", "data")})


def length_of(cp: int, row_width: int) -> int:
    """Returns a length of rows for measuring errors that context parallelism can divide."""
    step = 2 * cp * 8
    return max(step, min(MAX_LENGTH, row_width) // step * step)


def rows_like(has_documents: bool, num_rows: int, length: int, device: torch.device) -> Rows:
    """Makes rows full of text: one document each, or several, among them one of a single token if rows are long."""
    texts = []
    for row in range(num_rows):
        edges = {min(length - 1, max(1, int(length * part)) + row) for part in _EDGES if has_documents}
        texts.append(Text(np.zeros(length + 1, np.int64), np.ones(length + 1), edges=tuple(sorted(edges))))
    return rows_of(texts, length, 1, device)


def starts_of(rows: Rows) -> Tensor:
    """Returns the start of each token's document, [batch, seq] int32 on the CPU."""
    indices = torch.arange(rows.positions.shape[1])
    return (indices - rows.positions.cpu()).to(torch.int32)
