"""Decoder-only transformer as plain functions of its tensors, for one global batch.

Source of multi-token prediction: DeepSeek-V3 report (2024), section 2.2, equations 21 to 25; the embedding comes first
in the concatenation as in the published weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention import attention, kind_of
from mtrain.verify.reference.model.experts import Routed, experts
from mtrain.verify.reference.model.images import with_features
from mtrain.verify.reference.model.modules import AS_DEFINED, ExpertChanges, Module, network, norm
from mtrain.verify.reference.model.shapes import EMBEDDING, OUTPUT, has_branches, has_experts, has_network
from mtrain.verify.reference.text import Rows


@dataclass
class Forward:
    """Outputs of a forward pass, [batch, seq, ...]."""

    logits: Tensor
    ahead: list[Tensor] = field(default_factory=list)
    """Logits of later tokens by depth."""
    seen: list[Routed] = field(default_factory=list)
    """Router choices in forward order."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """Module outputs, except those of MTP layers."""


class Transformer:
    """Transformer as a function of its weights."""

    def __init__(self, model: ModelSection, tensors: Mapping[str, Tensor], changes: ExpertChanges = AS_DEFINED) -> None:
        """Ignores dropout; `tensors` are float64 weights, tables without vocabulary padding."""
        self._model, self._tensors, self._changes = model, tensors, changes

    def forward(self, rows: Rows, looks_ahead: bool = True) -> Forward:
        """Computes the logits of all rows, and of tokens further ahead if the model predicts them."""
        result = Forward(logits=torch.empty(0))
        hidden = self._embedded(rows.tokens)
        result.outputs["embedding"] = hidden
        embedded, deep = with_features(hidden, rows, self._model, self._tensors)
        hidden = embedded
        for number in range(self._model.num_layers):
            name = f"decoder.layers.{number}"
            hidden = self._layer(name, number, hidden, rows, rows.is_text, result, f"layer {number}")
            if number < len(deep):
                hidden = result.outputs[f"layer {number}"] = hidden + deep[number]
        hidden = norm(self._module("decoder.final_layernorm"), hidden)
        result.outputs["final_layernorm"] = hidden
        result.logits = result.outputs["output_layer"] = self._head(hidden)
        for depth in range(self._model.mtp_depths if looks_ahead else 0):
            hidden = self._depth(depth, hidden, embedded, rows, result)
            result.ahead.append(self._head(hidden))
        return result

    def layer(self, number: int, hidden: Tensor, rows: Rows, seen: list[Routed]) -> Tensor:
        """Computes one layer of hidden states, [batch, seq, hidden]; appends its router's choices to `seen`."""
        result = Forward(logits=torch.empty(0), seen=seen)
        return self._layer(f"decoder.layers.{number}", number, hidden, rows, rows.is_text, result, None)

    def _depth(self, depth: int, hidden: Tensor, embedded: Tensor, rows: Rows, result: Forward) -> Tensor:
        """Returns the hidden states of a depth after its final norm; `embedded` is the input of the first layer."""
        name, ahead = f"mtp.layers.{depth}", rows.ahead(depth + 1)
        later = torch.roll(embedded, -(depth + 1), dims=1)  # features of images among them
        later = torch.where(ahead.is_text.unsqueeze(-1), later, self._embedded(ahead.tokens))
        after = norm(self._module(f"{name}.enorm"), later)
        before = norm(self._module(f"{name}.hnorm"), hidden)
        joined = torch.cat([after, before], dim=-1) @ self._tensors[f"{name}.eh_proj.weight"].T
        last = self._model.num_layers - 1
        output = self._layer(f"{name}.transformer_layer", last, joined, rows, ahead.is_text, result, None)
        return norm(self._module(f"{name}.final_layernorm"), output)

    def _layer(
        self, name: str, number: int, hidden: Tensor, rows: Rows, is_text: Tensor, result: Forward, label: str | None
    ) -> Tensor:
        """Computes a layer of the kind of layer `number`; `label` prefixes its recorded outputs, None records none."""
        part, between, outputs = self._module(name), hidden, {}
        if kind_of(self._model, number) is not None:
            normed = self._before(part, "input_layernorm", hidden)
            attended = attention(part.inner("self_attention"), number, normed, rows)
            between = hidden + self._norm_after(part, "post_self_attn_layernorm", attended.output)
            outputs = {
                "input_layernorm": normed,
                "self_attention.core_attention": attended.context,
                "self_attention": attended.projected,
            }
        after = between
        if has_network(self._model, number):
            inner = between if has_branches(self._model, number) else self._before(part, "pre_mlp_layernorm", between)
            if has_experts(self._model, number):
                product = output = experts(part.inner("mlp"), inner, is_text, result.seen)
            else:
                product, output = network(part.inner("mlp"), inner)
            after = between + self._norm_after(part, "post_mlp_layernorm", output)
            outputs |= {"pre_mlp_layernorm": inner, "mlp": product}
        if (scalar := part.get("scalar")) is not None:
            after = after * scalar
        if label is not None:
            result.outputs |= {f"{label} {module}": values for module, values in outputs.items()} | {label: after}
        return after

    def _before(self, part: Module, name: str, x: Tensor) -> Tensor:
        return x if self._model.post_norm else norm(part.inner(name), x)

    def _norm_after(self, part: Module, name: str, x: Tensor) -> Tensor:
        return norm(part.inner(name), x) if self._model.sandwich_norm or self._model.post_norm else x

    def _embedded(self, tokens: Tensor) -> Tensor:
        hidden = self._tensors[EMBEDDING][tokens]
        return hidden * math.sqrt(self._model.hidden_size) if self._model.scale_embeddings else hidden

    def _head(self, hidden: Tensor) -> Tensor:
        # `merged` has separated a tied table whose adapter affects only the lookup
        logits = hidden @ self._tensors[OUTPUT if OUTPUT in self._tensors else EMBEDDING].T
        bound = self._model.logit_softcap
        return logits if bound is None else bound * torch.tanh(logits / bound)

    def _module(self, name: str) -> Module:
        return Module(self._model, self._tensors, name, self._changes)
