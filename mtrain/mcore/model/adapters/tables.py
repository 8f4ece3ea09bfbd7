"""Adapters of the table of embeddings, which is divided by token over TP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from mtrain.config.schema.adapter import AdapterSection
from mtrain.mcore.model.adapters.adapter import LORA_A, LORA_B, Adapter


class EmbeddingAdapter(Adapter):
    """A row of A for each token, [vocabulary, rank], and B [hidden, rank].

    A is divided like the table, its rows over TP, and is the transpose of PEFT's lora_embedding_A.
    """

    def __init__(
        self,
        section: AdapterSection,
        config: TransformerConfig,
        collection: ProcessGroupCollection,
        table: VocabParallelEmbedding,
    ) -> None:
        super().__init__(config, collection)
        self._section = section
        self._first, self._end = table.vocab_start_index, table.vocab_end_index
        self._scatters = table.reduce_scatter_embeddings
        rows, hidden = table.weight.shape
        self.add_parameter(f"embedding_{LORA_A}", (rows, section.rank), 0, may_be_padded=True)
        self.add_parameter(f"embedding_{LORA_B}", (hidden, section.rank), None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes what is added to embeddings of [batch, seq] tokens; one TP collective of `rank` numbers each."""
        is_here = (tokens >= self._first) & (tokens < self._end)
        local = torch.where(is_here, tokens - self._first, 0)
        found = functional.embedding(local, self.get_parameter(f"embedding_{LORA_A}"))
        narrow = torch.where(is_here.unsqueeze(-1), found, 0.0) * self._section.scale
        if self._scatters:
            # like the table's own output under sp: [seq_local, batch, ...]
            narrow = reduce_scatter_to_sequence_parallel_region(narrow.transpose(0, 1).contiguous(), group=self._tp)
        else:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=self._tp)
        # no dropout, as in PEFT: A reads token ids
        return functional.linear(narrow, self.get_parameter(f"embedding_{LORA_B}"))


def add_to_table(adapter: EmbeddingAdapter) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """Returns a forward hook for the table that has this adapter."""

    def hook(table: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + adapter(inputs[0]) if adapter.is_on else output

    return hook
