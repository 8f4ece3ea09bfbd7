"""Numbers of parameters, by how ranks hold them."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.plan.layout import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by the way in which ranks hold them."""

    divided: int = 0
    """Number of parameters that are divided over the ranks of a TP group."""
    replicated: int = 0
    """Number of parameters that every rank holds whole."""
    experts: int = 0
    """Number of parameters of experts that are divided over EP, each expert over ETP."""
    whole_experts: int = 0
    """Number of parameters of experts that are divided over EP, but whole on every rank of ETP."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.divided + other.divided,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.whole_experts + other.whole_experts,
        )

    def __mul__(self, times: int) -> Parameters:
        return Parameters(
            self.divided * times, self.replicated * times, self.experts * times, self.whole_experts * times
        )

    @property
    def total(self) -> int:
        """Counts the parameters of all kinds."""
        return self.divided + self.replicated + self.experts + self.whole_experts

    def on_rank(self, layout: Layout) -> RankParameters:
        """Counts the parameters that one rank holds."""
        experts = self.experts // (layout.ep * layout.etp) + self.whole_experts // layout.ep
        return RankParameters(dense=self.divided // layout.tp + self.replicated, experts=experts)


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Number of parameters that are copied over DP x CP."""
    experts: int
    """Number of parameters that are copied over the replicas of an expert."""

    @property
    def total(self) -> int:
        """Counts the parameters of both kinds."""
        return self.dense + self.experts
