"""A matrix of a model that may have an adapter, as the part of a layer that holds it describes it."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config.schema.adapter import AdapterSection
from mtrain.plan.counts import Parameters

EMBEDDING = "embedding.word_embeddings"


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix that has a pair of low rank: a projection, or a part of a fused one."""

    linear: str
    """Name of the module that holds it, within a layer; for a table, within the model."""
    part: str
    """Name of the target."""
    rows: int
    """Number of outputs: hidden size for the embedding, size of the vocabulary for `output`."""
    columns: int
    """Number of inputs; for the embedding, size of the vocabulary."""
    is_row_parallel: bool = False
    """Whether its columns are divided over TP, and not its rows."""
    is_replicated: bool = False
    """Whether every rank of TP holds all of it."""
    num_experts: int = 0
    """Number of matrices of this size in one layer, one an expert; 0 for one matrix that is no expert's."""

    def parameters(self, adapter: AdapterSection) -> Parameters:
        """Counts the parameters of the pair and of the magnitudes."""
        of_a, of_b = adapter.rank * self.columns, adapter.rank * self.rows
        if self.num_experts:
            return Parameters(experts=self.num_experts * (of_a + of_b))
        magnitudes = self.rows if adapter.has_magnitudes else 0
        if self.is_replicated:
            return Parameters(replicated=of_a + of_b + magnitudes)
        if self.is_row_parallel:
            return Parameters(divided=of_a, replicated=of_b + magnitudes)
        return Parameters(divided=of_b + magnitudes, replicated=of_a)

    def multiplied(self, adapter: AdapterSection, top_k: int) -> int:
        """Counts the elements of the pair by which one token is multiplied; `top_k` experts see it."""
        copies = top_k if self.num_experts else 1
        looked_up = adapter.rank * self.columns if self.linear == EMBEDDING else 0
        return copies * adapter.rank * (self.rows + self.columns) - looked_up
