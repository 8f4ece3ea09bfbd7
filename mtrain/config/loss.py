"""`loss.*`: what is minimised and by what it is divided."""

import re
from typing import Any, Literal

from pydantic import Field

from mtrain.config.section import Section, rule

Aggregation = Literal[
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "token-sum-norm",
    "seq-mean-token-sqrt",
    "sum",
]

NORM_AGGREGATIONS = ("seq-mean-token-sum-norm", "token-sum-norm")
"""The aggregations that divide by a constant length."""

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class TermSection(Section):
    """One term of the objective: coefficient x numerator / denominator."""

    function: str = "mtrain.loss.next_token:next_token_loss"
    """`package.module:name` of a function (TermInputs, **options) -> LossPair."""
    options: dict[str, Any] = Field(default_factory=dict)
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)
    """The constant L of the -norm aggregations, in tokens."""
    empty_sequences: Literal["exclude", "include"] = "exclude"
    """Whether a sequence without loss tokens counts in the denominator of the seq-mean aggregations."""

    @rule
    def functions_are_named_by_module(self) -> str | None:
        if _FUNCTION.fullmatch(self.function):
            return None
        return f"function={self.function!r} needs the form package.module:name; name the function that way"

    @rule
    def norm_aggregations_need_a_length(self) -> str | None:
        if self.norm_length is not None or self.aggregation not in NORM_AGGREGATIONS:
            return None
        return f"norm_length is not given, but aggregation={self.aggregation} divides by it; set it, in tokens"

    @rule
    def other_aggregations_have_no_length(self) -> str | None:
        if self.norm_length is None or self.aggregation in NORM_AGGREGATIONS:
            return None
        return (
            f"norm_length={self.norm_length} is not used by aggregation={self.aggregation}; remove it, or choose "
            f"{' or '.join(NORM_AGGREGATIONS)}"
        )


class SideTermSection(TermSection):
    """A term beside the main one."""

    coefficient: float = 1.0


class LossSection(TermSection):
    """The main term, and the side terms beside it by name."""

    denominator: Literal["planned", "measured"] = "planned"
    """planned: known from the masks before the forward pass, and checked against what was measured. measured: the loss
    function decides it from model outputs; no side terms are possible then."""
    side_terms: dict[str, SideTermSection] = Field(default_factory=dict)

    @rule
    def side_terms_need_a_planned_denominator(self) -> str | None:
        if self.denominator == "planned" or not self.side_terms:
            return None
        return (
            "denominator=measured is known only after the forward pass, but side terms are scaled before the backward "
            f"pass ({', '.join(self.side_terms)}); set it to planned, or remove the side terms"
        )

    @rule
    def side_terms_leave_the_main_name_free(self) -> str | None:
        if "main" not in self.side_terms:
            return None
        return "side_terms.main takes the name of the main term; choose another name"
