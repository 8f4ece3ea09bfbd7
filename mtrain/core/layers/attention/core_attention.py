"""Core attention of the torch spec: causal scaled_dot_product_attention, exact under context parallelism.

A `KeySet` says which keys a query sees, and a `KeySource` brings them to this rank. A row can hold several documents
with arbitrary boundaries, which attention never crosses. Context parallelism cuts rows, not documents, so packing does
not depend on the layout. On GPUs one kernel handles all documents of a microbatch; elsewhere, and for features that
this kernel lacks, each document takes a call.

A sink is a learned logit of a head that joins the softmax without a token, so that the head can attend to nothing.
Fused kernels do not return the softmax divisor with a gradient, and a mask with a logit per head would take memory for
every pair of tokens. Therefore the sink is a key: an additional dimension of each query holds sink / scale, and a key
in front of all others is 1 in that dimension and 0 elsewhere, with value 0. Its score is exactly the sink, and every
kernel can compute it, with its gradient, in memory that grows only with the number of tokens.

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
"""Number of dimensions that a sink adds; one would suffice, but GPU kernels take head sizes in steps of eight."""


class RowAttention(DividedModule, Remembering):
    """Attention of this rank's queries to the keys from its source."""

    divided_axes = MappingProxyType({"softmax_offset": 0})

    softmax_offset: nn.Parameter | None
    """Attention sinks, [heads_local]; None without sinks."""
    cached: Cached | None = None
    """Key source during generation, else None."""
    sees_ahead = True
    """Whether tokens of an image see each other both ways, if they do in any layer of the model."""

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
        # init_weights.py does not draw vectors, so sinks start as zeros
        sinks = torch.zeros(config.num_attention_heads // self.tp_group.size())
        self.softmax_offset = divided_parameter(config, sinks) if config.softmax_type == "learnable" else None

    @property
    def source(self) -> KeySource:
        """Source of keys and values: the cache during generation, else that of the layout."""
        return self.layout_source if self.cached is None else self.cached

    def remember(self, reading: CachedPass | None) -> None:
        """Starts to cache keys and values, or their latents; stops if `reading` is None."""
        self.cached = None if reading is None else Cached(reading)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends with this rank's queries, [seq_local, batch, heads_local, key_dim].

        Keys and values come from the source, for the heads of this rank, [seq, batch, groups, dim].

        Returns:
            [seq_local, batch, heads_local * value_dim].
        """
        return self.source.attend(self, query, key, value, keys).flatten(2)

    def attend_runs(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends with the queries of the given runs, concatenated, to the keys of whole rows."""
        if keys.documents is None:  # one kernel call for the whole batch
            whole = replace(keys, documents=(((0, len(key)),),))
            return self._attend_row(query, key, value, whole, runs)
        if keys.images is None and self._fits_varlen(query, key, value):  # one kernel call here as well
            return attend_segments(query, key, value, keys.segments(runs, len(key), query.device), self.scale)
        # a call for each document of each row: rows differ in their documents, so they cannot share a call without mask
        parts = [torch.split(part, 1, dim=1) for part in (query, key, value)]
        rows = []
        for row, (row_query, row_key, row_value) in enumerate(zip(*parts, strict=True)):
            images = None if keys.images is None else (keys.images[row],)
            row_keys = replace(keys, documents=(keys.documents[row],), images=images)
            rows.append(self._attend_row(row_query, row_key, row_value, row_keys, runs))
        return torch.cat(rows, dim=1)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, runs: Sequence[Run]) -> Tensor:
        """Attends in rows that all have the documents and images of the only row in `keys`."""
        assert keys.documents is not None
        (documents,), (images,) = keys.documents, ((),) if keys.images is None else keys.images
        pieces = list(pieces_of(runs, documents, images))
        queries = _split(query, [piece.num_queries for piece in pieces])
        lengths = [end - start for start, end in documents]
        of_document = [_split(part, lengths) for part in (key, value)]
        outputs = []
        for piece_query, piece in zip(queries, pieces, strict=True):
            # no key after the last that a query sees, so that no masked score is computed, and q = k if the run begins
            # with the document
            first, second = (_first(part[piece.document], piece.num_keys) for part in of_document)
            outputs.append(self._causal(piece_query, first, second, replace(keys, num_ahead=piece.num_ahead)))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # cat would copy even a single tensor

    def _fits_varlen(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Says whether the kernel for documents of any length is usable; it supports neither sinks nor dropout."""
        drops = self.dropout > 0 and self.training
        return self.softmax_offset is None and not drops and is_varlen_usable(query, key, value)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet) -> Tensor:
        """Attends as `KeySet.mask` says, in a piece of text causally, with the last query aligned to the last key:
        query [q, b, h, d], key and value [k, b, g, d], k >= q."""
        if self.softmax_offset is None:
            return self._weighted_values(query, key, value, keys, 0)
        value_dim = value.shape[-1]
        # float32 from here on, since the sum of its gradient over all tokens would lose bits in bfloat16
        sinks = widened(self.softmax_offset)
        # divided, since the kernel multiplies all scores by the scale, including that of the sink
        query, key, value = with_sink_keys(query, key, value, self.source.own_heads(sinks) / self.scale)
        return self._weighted_values(query, key, value, keys, 1)[..., :value_dim]

    def _weighted_values(self, query: Tensor, key: Tensor, value: Tensor, keys: KeySet, num_sinks: int) -> Tensor:
        """Computes `_causal`, with every query seeing the first `num_sinks` keys (0 or 1)."""
        mask = keys.mask(query.shape[0], key.shape[0] - num_sinks, num_sinks, query.device)
        # is_causal aligns the first query to the first key, which is right only for equally many of both
        is_causal = mask is None and keys.num_ahead is None
        if is_causal and num_sinks:
            # an additional first query makes the mask square again, which kernels handle as is_causal
            query = functional.pad(query, (0, 0, 0, 0, 0, 0, num_sinks, 0))
        if mask is not None and query.device.type == "cuda":
            # the lower-right bias selects a kernel without regard to grouped heads, and with a custom mask the only
            # kernel that supports them stores the scores of all pairs
            repeats = query.shape[2] // key.shape[2]
            key, value = (heads.repeat_interleave(repeats, dim=2) for heads in (key, value))
        # [batch, heads, seq, dim], a view
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # tensor-parallel ranks hold different heads, so each draws from a random state of its own, which fork() enters
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
        return output[num_sinks:] if is_causal and num_sinks else output  # without the additional query


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
        # megatron-core passes the same softmax_scale, that of its config, to every layer
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
        """Attends causally inside documents; `attention_mask` holds the document starts, see `key_set`.

        The query is [seq_local, batch, heads_local, head_dim], key and value [seq_local, batch, groups_local,
        head_dim].

        Returns:
            [seq_local, batch, heads_local * head_dim].
        """
        assert attention_bias is None
        # megatron-core's packing cuts rows at documents, so the contents of a rank would depend on cp
        assert packed_seq_params is None
        key, value = self.source.heads(key, value)
        return self.attend(query, key, value, key_set(attention_mask, self.window, self.sees_ahead))


def with_sink_keys(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, [length, batch, heads, dim] each, with the sink as additional key 0.

    `scores` has the sink of each head divided by the softmax scale, [heads] in at least float32. Heads get SINK_WIDTH
    additional dimensions; keys and values get one additional row in front.
    """
    dim = query.shape[-1]
    # cast last, so that the gradient is summed over tokens in float32
    column = scores.unsqueeze(-1).expand(*query.shape[:3], 1).to(query.dtype)  # [q, batch, heads, 1]
    query = functional.pad(torch.cat((query, column), dim=-1), (0, SINK_WIDTH - 1))
    # from the last axis on: SINK_WIDTH dimensions after, no groups, no rows, one key before
    key, value = (functional.pad(part, (0, SINK_WIDTH, 0, 0, 0, 0, 1, 0)) for part in (key, value))
    key[0, :, :, dim] = 1.0  # in place on the copy from pad; its value stays 0, so it takes weight and adds nothing
    return query, key, value


def _split(part: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    # not slices, whose backward fills a whole row with zeros and adds it to the gradient; the backward of a split
    # copies even a single part
    return torch.split(part, lengths) if len(lengths) > 1 else (part,)


def _first(part: Tensor, length: int) -> Tensor:
    return part if length == len(part) else part[:length]  # backward would copy even a slice of everything


def is_varlen_usable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Says whether torch's kernel for sequences of any length, for GPUs and half precision, accepts the inputs."""
    fits = query.dtype in (torch.float16, torch.bfloat16) and key.shape[-1] == value.shape[-1]
    return query.device.type == "cuda" and fits and _has_varlen_kernel()


@cache
def _has_varlen_kernel() -> bool:
    # torch 2.9 lacks it; its first versions support neither windows nor grouped heads
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    return {"scale", "window_size", "enable_gqa"} <= signature(_varlen_kernel()).parameters.keys()


def _varlen_kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # here, since it imports torch's compiler, which takes seconds

    return varlen_attn


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Attends causally in each piece, its last query aligned to its last key; one kernel for the whole microbatch.

    Queries are [seq_local, batch, heads, dim], keys and values [seq, batch, groups, dim] of whole rows. `kernel` takes
    the arguments of torch.nn.attention.varlen.varlen_attn, which is the default.

    Returns:
        [seq_local, batch, heads, dim].
    """
    # concatenated rows, [batch x seq, heads, dim]
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
