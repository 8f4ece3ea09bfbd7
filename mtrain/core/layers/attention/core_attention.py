"""Core attention of the torch spec: causal attention on scaled_dot_product_attention, exact under context parallelism.

A `KeySet` says which keys a query sees, a `KeySource` brings them here. A row can hold several documents, wherever
their edges fall; attention never crosses one. Rows, not documents, are cut for context parallelism, so packing does not
depend on the layout. On GPUs one kernel attends inside all documents of a microbatch; elsewhere, and for what that
kernel lacks, there is a call for each.

A sink is a learned logit of a head that joins the softmax without a token, so that a head can attend to nothing. Fused
kernels do not return the softmax's divisor with a gradient, and a mask with a logit for each head would take memory for
every pair of tokens. So the sink is one of the keys: a further dimension of each query holds sink / scale, a key before
all others is 1 in that dimension and 0 elsewhere, and its value is 0. Its score is the sink, exactly; every kernel can
compute it, with its gradient, in memory that grows only with the tokens.

Source: gpt-oss-120b and gpt-oss-20b model card, arXiv 2508.10925, section 2.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn
from torch.nn import functional

from mtrain.core.layers.attention.key_set import KeySet, Run, Segments, key_set, pieces_of, window_of
from mtrain.core.layers.attention.key_source import Cached, CachedPass, KeySource, Remembering, source_of
from mtrain.core.layers.own_parameters import DividedModule, divided_parameter
from mtrain.core.layers.products import widened

SINK_WIDTH = 8
"""Number of dimensions that a sink adds, though one would do: kernels on GPUs take head sizes in steps of eight."""


class RowAttention(DividedModule, Remembering):
    """Attention of this rank's queries to the keys that its source brings."""

    divided_axes = MappingProxyType({"softmax_offset": 0})

    softmax_offset: nn.Parameter | None
    """[heads_local] attention sinks."""
    cached: Cached | None = None
    """Source during generation."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, pg_collection.tp)
        self.layout_source = source_of(cp_comm_type, pg_collection.cp)
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.window = window_of(config, layer_number)
        self.dropout = config.attention_dropout
        # vectors are not drawn (init_weights.py): zeros are the initial sinks
        sinks = torch.zeros(config.num_attention_heads // self.tp_group.size())
        self.softmax_offset = divided_parameter(config, sinks) if config.softmax_type == "learnable" else None

    @property
    def source(self) -> KeySource:
        """Where keys and values come from."""
        return self.layout_source if self.cached is None else self.cached

    def remember(self, reading: CachedPass | None) -> None:
        """Keeps keys and values, or the latents that they come from."""
        self.cached = None if reading is None else Cached(reading)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends with this rank's queries, [seq_local, batch, heads_local, key_dim].

        Keys and values come from the source, for the heads of this rank, [seq, batch, groups, dim].

        Returns:
            [seq_local, batch, heads_local * value_dim].
        """
        return self.source.attend(self, query, key, value, keys).flatten(2)

    def attend_runs(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends with the queries of the given runs, laid one after the other, to the keys of whole rows."""
        if keys.documents is None:  # one kernel for the whole batch
            whole = replace(keys, documents=(((0, len(key)),),))
            return self._attend_row(query, key, value, whole, runs)
        if self._fits_varlen(query, key, value):  # likewise
            return attend_segments(query, key, value, keys.segments(runs, len(key), query.device), self.scale)
        # One for each document of each row. Rows differ in their documents, so no mask-free call fits two of them.
        parts = [torch.split(part, 1, dim=1) for part in (query, key, value)]
        rows = []
        for row_query, row_key, row_value, documents in zip(*parts, keys.documents):
            own = replace(keys, documents=(documents,))
            rows.append(self._attend_row(row_query, row_key, row_value, own, runs))
        return torch.cat(rows, dim=1)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends in rows with the same documents, which `keys` has for one row."""
        assert keys.documents is not None
        (documents,) = keys.documents
        pieces = list(pieces_of(runs, documents))
        # split, not sliced: in backward each slice would fill a whole row with zeros and add it to the others
        queries = torch.split(query, [piece.num_queries for piece in pieces])
        lengths = [end - start for start, end in documents]
        of_document = [torch.split(part, lengths) for part in (key, value)]
        outputs = []
        for own, piece in zip(queries, pieces, strict=True):
            # No key after the last query: nothing masked is computed, and q = k whenever the run begins with the
            # document.
            first, second = (_first(part[piece.document], piece.num_keys) for part in of_document)
            outputs.append(self._causal(own, first, second, keys))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # cat copies even a single tensor

    def _fits_varlen(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Says whether the kernel for documents of any length, which supports no sinks and no dropout, can be used."""
        drops = self.dropout > 0 and self.training
        return self.softmax_offset is None and not drops and is_varlen_usable(query, key, value)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends, the last query at the last key: query [q, b, h, d], key and value [k, b, g, d] with k >= q."""
        if self.softmax_offset is None:
            return self._weighted_values(query, key, value, keys, 0)
        value_dim = value.shape[-1]
        # float32 from here on: the sum of its gradient over all tokens would lose bits in bfloat16
        sinks = widened(self.softmax_offset)
        # divided, because the kernel multiplies all scores by the scale, that of the sink as well
        query, key, value = with_sink_keys(query, key, value, self.source.own_heads(sinks) / self.scale)
        return self._weighted_values(query, key, value, keys, 1)[..., :value_dim]

    def _weighted_values(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, num_sinks: int) -> Tensor:
        """Does what `_causal` does; the first `num_sinks` keys, 0 or 1, are seen by every query."""
        mask = keys.mask(query.shape[0], key.shape[0] - num_sinks, num_sinks, query.device)
        # scaled_dot_product_attention aligns is_causal at the first key: wrong where there are fewer queries
        is_causal = mask is None
        if is_causal and num_sinks:
            # a query that sees the sink alone makes a square again, which kernels handle without a mask
            query = functional.pad(query, (0, 0, 0, 0, 0, 0, num_sinks, 0))
        if mask is not None and query.device.type == "cuda":
            # the lower-right bias chooses a kernel without regard to grouped heads, and with a mask of our own the only
            # kernel that supports them is the one that keeps the scores of all pairs
            repeats = query.shape[2] // key.shape[2]
            key, value = (heads.repeat_interleave(repeats, dim=2) for heads in (key, value))
        # [batch, heads, seq, dim], a view
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # ranks of TP hold other heads: each draws from a state of its own, which the tracker forks to
        with get_cuda_rng_tracker().fork() if dropout else contextlib.nullcontext():
            output = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        output = output.permute(2, 0, 1, 3)
        return output[num_sinks:] if is_causal else output  # without the query that was added for the square


class CoreAttention(RowAttention):
    """Replaces megatron-core's DotProductAttention in a layer spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection,
        windowed_scale: float | None = None,
    ) -> None:
        """Takes megatron-core's arguments; `windowed_scale` replaces `softmax_scale` in layers with a window."""
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        # megatron-core passes the one softmax_scale of its config to every layer
        if windowed_scale is not None and window_of(config, layer_number) is not None:
            softmax_scale = windowed_scale
        super().__init__(config, layer_number, cp_comm_type, softmax_scale, pg_collection)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """Attends causally inside documents, whose starts are megatron-core's `attention_mask`, see `key_set`.

        The query is [seq_local, batch, heads_local, head_dim], key and value [seq_local, batch, groups_local,
        head_dim].

        Returns:
            [seq_local, batch, heads_local * head_dim].
        """
        assert attention_bias is None
        # megatron-core's packing cuts rows at documents, so what a CP rank holds would depend on cp
        assert packed_seq_params is None
        key, value = self.source.heads(key, value)
        return self.attend(query, key, value, key_set(attention_mask, self.window))


def with_sink_keys(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values of longer heads, [length, batch, heads, dim] each, with the sink as key 0.

    `scores`, [heads] and at least float32, are each head's sink divided by the scale of the scores. Heads get
    SINK_WIDTH dimensions more, keys and values one row more, in front.
    """
    dim = query.shape[-1]
    # the cast comes last, so that the gradient is summed over tokens in float32
    column = scores.unsqueeze(-1).expand(*query.shape[:3], 1).to(query.dtype)  # [q, batch, heads, 1]
    query = functional.pad(torch.cat((query, column), dim=-1), (0, SINK_WIDTH - 1))
    # pairs from the last axis on: SINK_WIDTH dimensions after, no groups, no rows, one key before
    key, value = (functional.pad(part, (0, SINK_WIDTH, 0, 0, 0, 0, 1, 0)) for part in (key, value))
    key[0, :, :, dim] = 1.0  # in place on what pad has made; its value stays 0, so it takes weight and adds nothing
    return query, key, value


def _first(part: Tensor, length: int) -> Tensor:
    return part if length == len(part) else part[:length]  # a slice of all would be copied in backward


def is_varlen_usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Says whether torch's kernel for sequences of any length, on GPUs and in half precision, accepts these."""
    fits = query.dtype in (torch.float16, torch.bfloat16) and key.shape[-1] == value.shape[-1]
    return query.device.type == "cuda" and fits and _has_varlen_kernel()


@cache
def _has_varlen_kernel() -> bool:
    # torch 2.9 lacks it; the first versions that have it know neither windows nor grouped heads
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    return {"scale", "window_size", "enable_gqa"} <= signature(_varlen_kernel()).parameters.keys()


def _varlen_kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler: seconds that a CPU run saves

    return varlen_attn


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Attends causally in each piece, its last query at its last key; one kernel for the whole microbatch.

    Queries are [seq_local, batch, heads, dim], keys and values [seq, batch, groups, dim] of whole rows. `kernel` has
    the arguments of torch.nn.attention.varlen.varlen_attn, which None means.

    Returns:
        [seq_local, batch, heads, dim].
    """
    # [batch x seq, heads, dim]: rows one after the other
    queries, keys, values = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))
    if segments.key_index is not None:
        keys, values = (part.index_select(0, segments.key_index) for part in (keys, values))
    output = (kernel or _varlen_kernel())(
        queries,
        keys,
        values,
        segments.query_ends,
        segments.key_ends,
        segments.longest_query,
        segments.longest_key,
        scale=scale,
        window_size=(-1 if segments.window is None else segments.window - 1, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    rows: Tensor = output.unflatten(0, (query.shape[1], query.shape[0]))
    return rows.transpose(0, 1)
