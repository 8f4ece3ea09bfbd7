"""Causal attention inside documents, with explicit scores; hidden states are [batch, seq, hidden].

Each kind of attention is listed in KINDS.
"""

from typing import NamedTuple, assert_never

from torch import Tensor

from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.attention_kind import AttentionKind
from mtrain.verify.reference.model.grouped_attention import GlobalAttention, GroupedAttention
from mtrain.verify.reference.model.latent_attention import LatentAttention
from mtrain.verify.reference.model.modules import Module
from mtrain.verify.reference.model.recurrent import DeltaNet, Mamba
from mtrain.verify.reference.text import Rows

_GROUPED, _GLOBAL, _LATENT = GroupedAttention(), GlobalAttention(), LatentAttention()
_DELTA_NET, _MAMBA = DeltaNet(), Mamba()
KINDS: tuple[AttentionKind, ...] = (_GROUPED, _GLOBAL, _LATENT, _DELTA_NET, _MAMBA)


def kind_of(model: ModelSection, layer: int) -> AttentionKind | None:
    """Returns the kind of attention of layer `layer`, counted from 0; None if the layer is only feed-forward."""
    match model.attention(layer):
        case "grouped":
            return _GROUPED
        case "global":
            return _GLOBAL
        case "latent":
            return _LATENT
        case "delta_net":
            return _DELTA_NET
        case "mamba":
            return _MAMBA
        case "none":
            return None
        case _ as never:
            assert_never(never)


def kinds_of(model: ModelSection) -> tuple[AttentionKind, ...]:
    """Returns the kinds of attention of all layers, each once."""
    kinds = dict.fromkeys(kind_of(model, layer) for layer in range(model.num_layers))
    return tuple(kind for kind in kinds if kind is not None)


class Attended(NamedTuple):
    """Outputs of an attention; [batch, seq, ...]."""

    context: Tensor
    """Weighted values of all heads, concatenated."""
    projected: Tensor
    """Output without the projection's bias."""
    output: Tensor


def attention(part: Module, layer: int, x: Tensor, rows: Rows) -> Attended:
    """Computes the self-attention of layer `layer`, counted from 0; the layer must have one."""
    kind = kind_of(part.model, layer)
    assert kind is not None
    heads = kind.context(part, layer, x, rows)
    projected = kind.projected(part, x, heads)
    bias = part.get("linear_proj.bias")
    return Attended(heads, projected, projected if bias is None else projected + bias)
