"""`loss.*`: what is minimised and by what it is divided."""

from typing import Any, Literal

from pydantic import Field

from mtrain.config.section import Section

Aggregation = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "seq-mean-token-sqrt",
    "sum",
]


class TermSection(Section):
    """One term of the objective: coefficient x numerator / denominator."""

    function: str = "mtrain.loss.next_token:next_token_loss"
    """`package.module:name` of a function (TermInputs, **options) -> LossPair."""
    options: dict[str, Any] = {}
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)
    """The constant L of the -norm aggregations, in tokens."""
    empty_sequences: Literal["exclude", "include"] = "exclude"
    """Whether a sequence without loss tokens counts in the denominator of the seq-mean aggregations."""


class SideTermSection(TermSection):
    """A term beside the main one."""

    coefficient: float = 1.0


class LossSection(TermSection):
    """The main term, and the side terms beside it by name."""

    denominator: Literal["planned", "measured"] = "planned"
    """planned: known from the masks before the forward pass, and checked against what was measured. measured: the loss
    function decides it from model outputs; no side terms are possible then."""
    side_terms: dict[str, SideTermSection] = {}
