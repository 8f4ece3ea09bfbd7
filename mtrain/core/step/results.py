"""What the methods of `Engine` return; the same on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.engine.loss_reduction import StepTotals, TermTotals
from mtrain.core.engine.optimizer import Update


@dataclass(frozen=True)
class ForwardResult:
    """Scores of the tokens of each sample, in the order of the samples; float32 on the CPU, in nats."""

    log_probs: list[Tensor]
    """Log-probabilities of input_ids[1:] for each sample, [len(input_ids) - 1], masked tokens included."""
    entropy: list[Tensor]
    """Entropies of predictions of input_ids[1:] for each sample, [len(input_ids) - 1]; empty if not requested."""
    routed_experts: list[Tensor] = field(default_factory=list)
    """Experts of input_ids[:-1] of each sample, [len(input_ids) - 1, layers, top_k] int32, for `Datum.routed_experts`;
    -1 in dense layers. Empty if not requested."""
    likeliest: list[Tensor] = field(default_factory=list)
    """Whether no token was likelier than that of input_ids[1:], for each sample, [len(input_ids) - 1] bool: what greedy
    decoding would have chosen. Empty if not requested."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on all ranks."""

    step: int
    """Number of steps completed, this one included."""
    loss: float
    """Loss of the main term in nats: the sum of weight x loss over the whole batch, divided by its denominator; 0 for
    an empty batch."""
    objective: float
    """Main term plus side terms: the quantity that was differentiated."""
    denominator: float
    """Denominator of the main term, according to its aggregation."""
    grad_norm: float
    """Global L2 norm of the normalised gradient, before clipping; 0 for an empty batch, NaN after an fp16 overflow."""
    lr: float
    tokens: int
    """Number of tokens read in all calls of the step, without padding."""
    applied: bool
    """Whether the weights were updated; False if the batch had no loss tokens or fp16 overflowed."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """Diagnostics of the loss functions over all tokens or groups of the step, such as clip_fraction and
    reward_accuracy (docs/training/policy-losses.md, docs/training/preference.md). Those of a side term are named
    `term/name`; means over no tokens are left out."""

    @classmethod
    def of(cls, totals: StepTotals, update: Update | None, step: int, lr: float, tokens: int) -> Self:
        """Makes the result from the totals of a step; `update` is None if the batch was empty."""
        return cls(
            step=step,
            loss=totals.loss,
            objective=totals.objective,
            denominator=totals.terms[MAIN_TERM].denominator,
            grad_norm=0.0 if update is None else update.grad_norm,
            lr=lr,
            tokens=tokens,
            applied=update is not None and not update.overflowed,
            diagnostics=dict(totals.diagnostics),
        )


@dataclass(frozen=True)
class EvalResult:
    """Losses over an evaluation set, with each sample counted once; the same on all ranks."""

    loss: float
    """Loss of the main term, in nats."""
    denominator: float
    terms: dict[str, float]
    """Mean of each term, the main term (`main`) included."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """Diagnostics of the loss functions, as in `StepResult`."""

    @classmethod
    def of(cls, terms: Mapping[str, TermTotals], diagnostics: Mapping[str, float]) -> Self:
        """Makes the result from the totals of a pass."""
        main = terms[MAIN_TERM]
        return cls(main.mean, main.denominator, {term: total.mean for term, total in terms.items()}, dict(diagnostics))
