"""Core attention of the torch spec: causal attention on scaled_dot_product_attention, exact under context parallelism.

Under context parallelism a rank holds chunks r and 2*cp-1-r of every row (zigzag), so queries come as at most two
contiguous runs of the row. Keys and values are brought together in one of three ways: `allgather` collects those of the
whole row on every rank; `ulysses` exchanges sequence for heads, so that each rank sees whole rows of a part of the
heads; in a `ring` they are passed around (`ring.py`), and nothing below applies. Latent attention collects its latents
in the first two, and computes keys and values from them for the heads it attends with.
A row can hold several documents, wherever their edges fall; attention never crosses one. Rows, not documents, are cut
for context parallelism, so packing does not depend on the layout. On GPUs one kernel attends inside all documents of a
microbatch (`documents.py`); elsewhere, and for what that kernel lacks, there is a call for each.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional

from mtrain.core.layers.attention.cache import CachedPass, KeyValueCache, Remembering
from mtrain.core.layers.attention.documents import (
    Run,
    attend_segments,
    has_window,
    is_varlen_usable,
    pieces_of,
    segments_of,
)
from mtrain.core.layers.attention.exchange import row_order, to_heads, to_sequence
from mtrain.core.layers.attention.ring import ring_attention
from mtrain.core.layers.attention.sinks import sink_parameter, with_sink_keys
from mtrain.core.layers.own_parameters import own_places


class RowAttention(MegatronModule, Remembering):
    """Causal attention of this rank's queries to keys and values of whole rows."""

    softmax_offset: nn.Parameter | None
    """[heads_local] attention sinks."""
    cache: KeyValueCache | None = None
    """Cache during generation. Every context-parallel rank then reads whole rows, of sequences of its own."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.cp = pg_collection.cp
        # megatron-core's names of the exchange of sequence for heads, and of keys and values that are passed around
        self.ulysses, self.ring = cp_comm_type == "a2a", cp_comm_type == "p2p"
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        # depths of multi-token prediction continue the model's numbers of layers
        layer_number = min(layer_number, config.num_layers)  # layers after the last one are of its kind
        # window_size counts the keys before the query's own; the masks below count that one, too
        self.window = config.window_size[0] + 1 if has_window(config, layer_number) else None
        self.dropout = config.attention_dropout
        self.tp = pg_collection.tp
        self.softmax_offset = sink_parameter(config, self.tp) if config.softmax_type == "learnable" else None

    def remember(self, reading: CachedPass | None) -> None:
        """Keeps keys and values, or the latents that they come from."""
        self.cache = None if reading is None else KeyValueCache(reading)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, document_starts: Tensor | None) -> Tensor:
        """Attends causally to keys of whole rows.

        Args:
            query: [seq_local, batch, heads_local, key_dim].
            key: [seq, batch, groups, key_dim] in the order of the row, for the heads that this rank attends with.
            value: [seq, batch, groups, value_dim] likewise.
            document_starts: Start of each token's document, [batch, seq] on the CPU, full rows; None where each row is
                one document.

        Returns:
            [seq_local, batch, heads_local * value_dim].
        """
        # On the host, once for all heads: the ends of documents decide on shapes, for which the host would have to wait
        # for a GPU.
        documents = None if document_starts is None else document_runs(document_starts)
        if self.cache is not None and (visible := self.cache.visible(self.window)) is not None:
            # a query of each sequence: the batch, [1, tokens, heads, dim]
            output = self._causal(query.transpose(0, 1), key, value, visible).transpose(0, 1)
        elif self._has_whole_rows:
            key, value = _heads_apart(key), _heads_apart(value)
            output = self._attend(query, key, value, [(0, query.shape[0])], documents)
        elif self.ulysses:
            output = self._attend_with_own_heads(query, key, value, documents)
        else:
            # an early and a late chunk each: under a causal mask all ranks have equally many pairs to compute
            chunk, last = query.shape[0] // 2, 2 * self.cp.size() - 1
            first = self.cp.rank()
            key, value = _heads_apart(key), _heads_apart(value)
            runs = [(index * chunk, (index + 1) * chunk) for index in (first, last - first)]
            output = self._attend(query, key, value, runs, documents)
        return output.reshape(*output.shape[:2], -1)

    def gather_rows(self, part: Tensor) -> Tensor:
        """Gathers [seq_local, batch, ...] -> [seq, batch, ...] in the order of the row, the same on every rank of CP.

        Costs one all-gather over CP; its backward is a reduce-scatter.
        """
        if self._has_whole_rows:
            return part
        # The function has another purpose by its name, but gathers along the first axis, over any group. Its backward
        # sums, since queries of every rank read all keys.
        gathered = gather_from_sequence_parallel_region(part, group=self.cp)
        return gathered.index_select(0, self._orders(gathered)[1])

    def own_heads(self, num_heads: int) -> slice:
        """Returns the heads of its queries that this rank attends with: a part of them under Ulysses, else all."""
        if self._has_whole_rows or not self.ulysses:
            return slice(0, num_heads)
        num_own = num_heads // self.cp.size()
        return slice(self.cp.rank() * num_own, (self.cp.rank() + 1) * num_own)

    @property
    def _has_whole_rows(self) -> bool:
        return self.cp.size() == 1 or self.cache is not None

    def _orders(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `row_order` of [seq, ...]."""
        return row_order(rows.shape[0], self.cp.size(), rows.device)

    def _attend_with_own_heads(
        self, query: Tensor, key: Tensor, value: Tensor, documents: list[list[Run]] | None
    ) -> Tensor:
        """Attends under Ulysses: one all-to-all over CP before and one after; the same again in backward."""
        # whole rows from here on, so documents and windows do not depend on CP: one run from 0 to the row's end
        query = self._to_heads(query)
        output = self._attend(query, key, value, [(0, query.shape[0])], documents)
        held, _ = self._orders(query)
        return to_sequence(output.index_select(0, held), self.cp)

    def _to_heads(self, part: Tensor) -> Tensor:
        """[seq_local, batch, heads, dim] -> [seq in the order of the row, batch, heads / cp, dim]; one all-to-all."""
        part = to_heads(part, self.cp)
        return part.index_select(0, self._orders(part)[1])

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, runs: list[Run], documents: list[list[Run]] | None
    ) -> Tensor:
        """Attends with the queries of the given runs, laid one after the other, to the keys of whole rows."""
        if documents is None:  # one kernel for the whole batch
            return self._attend_row(query, key, value, runs, [(0, key.shape[0])])
        if self._fits_varlen(query, key, value):  # likewise
            pieces = [tuple(pieces_of(runs, row_documents)) for row_documents in documents]
            segments = segments_of(tuple(pieces), key.shape[0], query.device)
            return attend_segments(query, key, value, segments, self.scale, self.window)
        # One for each document of each row. Rows differ in their documents, so no mask-free call fits two of them.
        queries, keys, values = (torch.split(part, 1, dim=1) for part in (query, key, value))
        rows = [self._attend_row(q, k, v, runs, own) for q, k, v, own in zip(queries, keys, values, documents)]
        return torch.cat(rows, dim=1)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, runs: list[Run], documents: list[Run]) -> Tensor:
        pieces = list(pieces_of(runs, documents))
        # split, not sliced: in backward each slice would fill a whole row with zeros and add it to the others
        queries = torch.split(query, [piece.num_queries for piece in pieces])
        lengths = [end - start for start, end in documents]
        keys, values = torch.split(key, lengths), torch.split(value, lengths)
        outputs = [
            # No key after the last query: nothing masked is computed, and q = k whenever the run begins with the
            # document.
            self._causal(own, *(_first(part[piece.document], piece.num_keys) for part in (keys, values)))
            for own, piece in zip(queries, pieces, strict=True)
        ]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # cat copies even a single tensor

    def _fits_varlen(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Says whether the kernel for documents of any length, which supports no sinks and no dropout, can be used."""
        drops = self.dropout > 0 and self.training
        return self.softmax_offset is None and not drops and is_varlen_usable(query, key, value)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
        """Attends causally, the last query at the last key: query [q, b, h, d], key and value [k, b, g, d] with k >= q.

        `visible`, [b, 1, q, k] bool: the keys that each query sees instead.
        """
        if self.softmax_offset is None:
            return self._weighted_values(query, key, value, 0, visible)
        value_dim = value.shape[-1]
        # divided, because the kernel multiplies all scores by the scale, that of the sink as well
        query, key, value = with_sink_keys(query, key, value, self._sinks() / self.scale)
        return self._weighted_values(query, key, value, 1, visible)[..., :value_dim]

    def _sinks(self) -> Tensor:
        """Returns the sinks, [heads], at least float32, of the heads whose queries this rank holds now."""
        assert self.softmax_offset is not None
        # float32 from here on: the sum of its gradient over all tokens would lose bits in bfloat16
        sinks = self.softmax_offset.to(torch.promote_types(self.softmax_offset.dtype, torch.float32))
        return sinks.chunk(self.cp.size())[self.cp.rank()] if self.ulysses and not self._has_whole_rows else sinks

    def _weighted_values(
        self, query: Tensor, key: Tensor, value: Tensor, num_sinks: int, visible: Tensor | None
    ) -> Tensor:
        """Does what `_causal` does; the first `num_sinks` keys, 0 or 1, are seen by every query."""
        query_length, key_length = query.shape[0], key.shape[0] - num_sinks
        # scaled_dot_product_attention aligns is_causal at the first key: wrong where there are fewer queries
        is_causal, mask = query_length == key_length and visible is None, visible
        if visible is not None:
            mask = functional.pad(visible, (num_sinks, 0), value=True)
        elif self.window is not None and self.window < key_length:
            is_causal, mask = False, _window_mask(query_length, key_length, self.window, query.device)
            mask = functional.pad(mask, (num_sinks, 0), value=True)  # a window never hides the sink
        elif is_causal:
            # a query that sees the sink alone makes a square again, which kernels handle without a mask
            query = functional.pad(query, (0, 0, 0, 0, 0, 0, num_sinks, 0)) if num_sinks else query
        else:
            mask = _prefix_mask(query_length, key.shape[0], query.device)
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

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the places of the sinks, which are split over TP like the heads."""
        return own_places(self, {"softmax_offset": 0}, self.tp, prefix, sharded_offsets, metadata)


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
        if windowed_scale is not None and has_window(config, layer_number):
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
        """Causal attention inside documents.

        Args:
            query: [seq_local, batch, heads_local, head_dim].
            key: [seq_local, batch, groups_local, head_dim].
            value: Values, in the shape of key.
            attention_mask: Starts of documents of the batch, [batch, seq] on the CPU, full rows; None where each row is
                one document.
            attn_mask_type: Part of megatron-core's protocol; attention is always causal.
            attention_bias: Must be None.
            packed_seq_params: Part of megatron-core's protocol; must be None: attention_mask has the documents.

        Returns:
            [seq_local, batch, heads_local * head_dim].
        """
        assert attention_bias is None
        # megatron-core's packing cuts rows at documents, so what a CP rank holds would depend on cp
        assert packed_seq_params is None
        if self.ring and not self._has_whole_rows:
            assert attention_mask is None, "documents are refused with a ring (config/known_issues.py)"
            return self._around_the_ring(query, key, value)
        if self.cache is not None:
            seen = self.cache.extended(torch.cat((key, value), dim=-1))
            key, value = torch.split(seen, [key.shape[-1], value.shape[-1]], dim=-1)
        else:
            key, value = self._whole_rows(key, value)
        return self.attend(query, key, value, attention_mask)

    def _around_the_ring(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends to this rank's keys, and to those of the others as they arrive."""
        return ring_attention(query, key, value, self.scale, self.cp).flatten(2)

    def _whole_rows(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Maps keys and values of this rank's tokens to those of whole rows, under Ulysses only for its own heads."""
        if self.cp.size() == 1:
            return key, value
        if not self.ulysses:
            head_dim = key.shape[-1]
            # both in one all-gather forward and one reduce-scatter backward
            gathered = self.gather_rows(torch.cat((key, value), dim=-1))
            key, value = torch.split(gathered, [head_dim, gathered.shape[-1] - head_dim], dim=-1)
            return key, value
        cp, groups = self.cp.size(), key.shape[2]
        if groups % cp:  # fewer key/value heads than ranks are repeated
            repeats = cp // math.gcd(groups, cp)
            key, value = (heads.repeat_interleave(repeats, dim=2) for heads in (key, value))
        return self._to_heads(key), self._to_heads(value)


def _prefix_mask(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Builds a causal mask with the last query at the last key; on a GPU in the form that allows flash attention."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: seconds that a CPU run saves

        bias: Tensor = causal_lower_right(query_length, key_length)
        return bias
    return _window_mask(query_length, key_length, key_length, device)


def _window_mask(query_length: int, key_length: int, window: int, device: torch.device) -> Tensor:
    """Returns [query, key] bool: True from `window - 1` positions before the query up to the query."""
    # queries are the last positions
    query = torch.arange(key_length - query_length, key_length, device=device)[:, None]
    distance = query - torch.arange(key_length, device=device)[None]
    return (distance >= 0) & (distance < window)


def _heads_apart(part: Tensor) -> Tensor:
    """Lays out [seq, batch, heads, dim], on a CPU, with the positions of a head one after the other: torch's kernel
    multiplies one head at a time, and rows a power of two apart would collide in the cache."""
    if part.device.type != "cpu" or part.stride(0) == part.shape[-1]:
        return part
    return part.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def _first(part: Tensor, length: int) -> Tensor:
    return part if length == len(part) else part[:length]  # a slice of all would be copied in backward


def document_runs(document_starts: Tensor) -> list[list[Run]]:
    """Maps [batch, seq] starts to the runs of the documents of each row."""
    rows, length = document_starts.numpy(), document_starts.shape[1]
    runs = []
    for row in rows:
        # starts never decrease along a row
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist()]
        runs.append(list(zip(starts, [*starts[1:], length])))
    return runs
