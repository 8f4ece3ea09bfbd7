"""Documents of a row for TransformerEngine's attention, which cuts a row of tokens at given ends."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mtrain.mcore.model.attention.context_parallel import document_runs
from mtrain.mcore.model.attention.documents import pieces_of, segments_of


class DocumentAttention(TEDotProductAttention):
    """TransformerEngine's attention, inside the documents of each row; the same for rows of one document.

    Only this module sees the packed form: projections, norms and rotation take rows, as with our own attention.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        **options: Any,
    ) -> Tensor:
        """Attends causally.

        Args:
            query: [seq, batch, heads_local, dim].
            key: [seq, batch, groups_local, dim].
            value: Values, in the shape of key.
            attention_mask: Start of each token's document, [batch, seq] on the CPU; None where each row is one.
            arguments: Further arguments of megatron-core's module: the type of the mask.
            options: Further named arguments of megatron-core's module.

        Returns:
            [seq, batch, heads_local * dim].
        """
        if attention_mask is None:
            output: Tensor = super().forward(query, key, value, None, *arguments, **options)
            return output
        seq, batch = query.shape[:2]
        pieces = [tuple(pieces_of([(0, seq)], row)) for row in document_runs(attention_mask)]
        segments = segments_of(tuple(pieces), seq, query.device)
        # [batch * seq, heads, dim]: rows one after the other
        rows = [part.transpose(0, 1).flatten(0, 1) for part in (query, key, value)]
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=segments.query_ends,
            cu_seqlens_kv=segments.key_ends,
            max_seqlen_q=segments.longest_query,
            max_seqlen_kv=segments.longest_key,
        )
        output = super().forward(*rows, None, *arguments, **{**options, "packed_seq_params": packed})
        return output.reshape(batch, seq, -1).transpose(0, 1)
