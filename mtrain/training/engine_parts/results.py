"""What the methods of `Engine` return: the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from mtrain.loss.pair import MAIN_TERM
from mtrain.mcore.engine.loss_reduction import StepTotals, TermTotals
from mtrain.mcore.engine.optimizer import Update


@dataclass(frozen=True)
class ForwardResult:
    """What the model thinks of the tokens of each sample, in the order of the samples; float32 on the CPU, in nats."""

    log_probs: list[Tensor]
    """[len(input_ids) - 1] each: the log-probability of input_ids[1:], whatever the weights."""
    entropy: list[Tensor]
    """[len(input_ids) - 1] each: of the whole distribution that input_ids[1:] was predicted by; no entry where it was
    not asked for."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on all ranks."""

    step: int
    """Steps completed, this one included."""
    loss: float
    """Of the main term: sum of weight x loss over the whole batch / its denominator, in nats; 0 for an empty batch."""
    objective: float
    """With the side terms: the quantity that was differentiated."""
    denominator: float
    """What the main term was divided by, as its aggregation says."""
    grad_norm: float
    """Global L2 norm of the normalised gradient, before clipping; 0 for an empty batch, NaN after an fp16 overflow."""
    lr: float
    tokens: int
    """Tokens read, over all calls of the step; padding left out."""
    applied: bool
    """False where nothing was learned: the batch had no loss tokens, or fp16 overflowed and lowered its loss scale."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """What the loss functions report (docs/policy-losses.md, docs/preference.md), each over all tokens or groups of the
    step: clip_fraction, reward_accuracy and the like; of a side term `term/name`. Without those that nothing counted
    for."""

    @classmethod
    def of(cls, totals: StepTotals, update: Update | None, step: int, lr: float, tokens: int) -> Self:
        """From what a step has summed; `update` is None where the batch was empty."""
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
    """The loss over some data, each sample counted once; the same on all ranks."""

    loss: float
    """Of the main term, in nats."""
    denominator: float
    terms: dict[str, float]
    """Each term's mean, the main one (`main`) included."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """As of `StepResult`."""

    @classmethod
    def of(cls, terms: Mapping[str, TermTotals], diagnostics: Mapping[str, float]) -> Self:
        """From what a pass has summed."""
        main = terms[MAIN_TERM]
        return cls(main.mean, main.denominator, {term: each.mean for term, each in terms.items()}, dict(diagnostics))
