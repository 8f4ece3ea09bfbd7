"""Numbers of parameters, by how ranks hold them."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.plan.layout import Layout


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, by how ranks hold them."""

    divided: int = 0
    """Over the ranks of a TP group."""
    replicated: int = 0
    """Whole on every rank."""
    experts: int = 0
    """Over EP, and each expert over ETP."""
    whole_experts: int = 0
    """Over EP, but whole on every rank of ETP."""

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
        """All kinds."""
        return self.divided + self.replicated + self.experts + self.whole_experts

    def on_rank(self, layout: Layout) -> RankParameters:
        """What one rank holds of them."""
        experts = self.experts // (layout.ep * layout.etp) + self.whole_experts // layout.ep
        return RankParameters(dense=self.divided // layout.tp + self.replicated, experts=experts)


@dataclass(frozen=True)
class RankParameters:
    """Numbers of parameters on one rank."""

    dense: int
    """Copied over DP x CP."""
    experts: int
    """Copied over the replicas of an expert."""

    @property
    def total(self) -> int:
        """Both kinds."""
        return self.dense + self.experts
