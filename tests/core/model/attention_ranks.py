"""Core attention on the ranks of a context-parallel group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType

from mtrain.config import Config
from mtrain.core.batch.zigzag import zigzag_index
from mtrain.core.layers.attention.core_attention import CoreAttention
from mtrain.core.layers.transformer_config import CP_COMM_TYPES, transformer_config
from mtrain.core.ranks.groups import Groups
from tests.core.loss.vocab_parallel.counting import Kernels


class Attended(NamedTuple):
    """A rank's part of the output and of the gradients, all [seq_local, batch, heads or groups, head_dim]."""

    output: Any
    query: Any
    key: Any
    value: Any


def attend(groups: Groups, config: Config, layer: int, inputs: dict[str, Any], document_starts: Any) -> Attended:
    """Runs the core attention of a layer on this rank's slice.

    Args:
        groups: The process groups.
        config: Heads and window.
        layer: Number of the layer, from 1.
        inputs: `query`, `key`, `value` and the output's gradient `grad`: float64 [seq, batch, heads, head_dim], whole.
        document_starts: [batch, seq] int32 or None.
    """
    core = CoreAttention(
        config=transformer_config(config, groups.layout, groups.device),
        layer_number=layer,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=CP_COMM_TYPES[groups.layout.cp_comm],
        softmax_scale=None,
        pg_collection=groups.collection,
    )
    seq, cp = len(inputs["query"]), groups.layout.cp
    own = zigzag_index(seq, cp, groups.cp_rank) if cp > 1 else torch.arange(seq)
    query, key, value = (torch.from_numpy(inputs[name])[own].requires_grad_() for name in ("query", "key", "value"))
    starts = None if document_starts is None else torch.from_numpy(document_starts.astype(np.int32))
    output = core(query, key, value, starts)
    output.backward(torch.from_numpy(inputs["grad"])[own].flatten(2))
    gradients = [tensor.grad.numpy() for tensor in (query, key, value) if tensor.grad is not None]
    return Attended(output.detach().view_as(query).numpy(), *gradients)


def kernels(groups: Groups, config: Config, inputs: dict[str, Any]) -> list[str]:
    """Returns the operations of `attend` over tensors of the size of keys or more, without documents."""
    passes = Kernels(inputs["key"].size)
    with passes:
        attend(groups, config, 1, inputs, None)
    return passes.names
