"""A matrix of a model that may have an adapter, as the part of a layer that holds it describes it."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config.schema.adapter import AdapterSection
from mtrain.plan.counts import Parameters

EMBEDDING = "embedding.word_embeddings"


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix that has a pair of low rank beside it: a projection, or a part of a fused one."""

    linear: str
    """The module that holds it, inside of a layer; tables outside of layers."""
    part: str
    """Name of the target."""
    rows: int
    """Outputs; of the embedding hidden numbers, and of `output` tokens of the vocabulary."""
    columns: int
    """Inputs; of the embedding tokens of the vocabulary."""
    is_row_parallel: bool = False
    """Whether its columns are divided over TP, and not its rows."""
    is_replicated: bool = False
    """Whether every rank of TP holds all of it."""
    num_experts: int = 0
    """So many matrices of this size in one layer; 0: one, which is no expert's."""

    def parameters(self, adapter: AdapterSection) -> Parameters:
        """Of the pair, and of the magnitudes."""
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
        """Elements of the pair that one token is multiplied by; `top_k` experts see it."""
        copies = top_k if self.num_experts else 1
        looked_up = adapter.rank * self.columns if self.linear == EMBEDDING else 0
        return copies * adapter.rank * (self.rows + self.columns) - looked_up
