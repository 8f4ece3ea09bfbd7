"""The contract of a preference loss: a function of the scores of all sequences of a global batch.

A score is the sum (loss.aggregation=seq-mean-token-sum) or the mean (seq-mean-token-mean) of the log-probabilities of a
sequence's loss tokens. A first forward pass computes the scores of the whole batch on all ranks; the loss is then a
function of a few short float64 vectors, the same on every rank, and so is its derivative by each score. A second pass
multiplies each token by the derivative of its sequence, which gives the exact gradient
(`mtrain/core/step/scoring_pass.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.core.loss.pair import LossPair, TermInputs, per_token, weigh
from mtrain.core.loss.preference.member import ROLES, Role

SUM_AND_SUM = tuple[Tensor, Tensor]
"""Diagnostic as two scalars: a sum over the batch, and its divisor."""


class PreferenceValue(NamedTuple):
    """Result of a preference loss for a batch: undivided sums, as for every loss."""

    numerator: Tensor
    """Sum of weight x loss, float64 scalar with a graph."""
    shares: Tensor
    """Summand of each sequence in the denominator, [sequences] float64."""
    diagnostics: dict[str, SUM_AND_SUM]


@dataclass(frozen=True)
class Answers:
    """Some of the sequences of a batch; each field is [n], float64 unless it says otherwise."""

    index: Tensor
    """Positions of the answers among all sequences, int64."""
    scores: Tensor
    """Scores under the model, with a graph."""
    reference: Tensor
    """Scores under the reference model; 0 where the loss needs none."""
    lengths: Tensor
    """Sum of each answer's token weights."""
    weights: Tensor
    margins: Tensor
    """Margin by which an answer is labelled better than its counterpart; 0 where the data give none."""

    @property
    def ratios(self) -> Tensor:
        """Returns the log of the likelihood ratio to the reference model."""
        return self.scores - self.reference


class Pairs(NamedTuple):
    """Pairs of a chosen and a rejected answer; each vector is [pairs]."""

    chosen: Answers
    rejected: Answers

    @property
    def weights(self) -> Tensor:
        """Returns the weight of each pair."""
        return self.chosen.weights


@dataclass(frozen=True)
class ScoredSequences:
    """All sequences of a global batch in the order of their slots, the same on all ranks; each field is [sequences]."""

    scores: Tensor
    """Scores under the model, float64, on the CPU like the other fields; differentiable."""
    reference: Tensor
    """Scores under the reference model, float64; nan where a sequence has none."""
    lengths: Tensor
    """Sum of each sequence's token weights, float64; 0 where a sequence has no loss token."""
    weights: Tensor
    """Weights of the samples, float64."""
    groups: Tensor
    """Group of each sequence, int64."""
    roles: Tensor
    """Role of each sequence, int64: index into `ROLES`."""
    margins: Tensor | None = None
    """Margins as in `Answers`, float64; None where the data give none."""

    def of(self, role: Role) -> Answers:
        """Returns the sequences of a role that have a loss token and a weight."""
        return self._at(torch.nonzero(self._counts & (self.roles == ROLES.index(role))).flatten())

    def pairs(self) -> Pairs:
        """Returns the chosen and the rejected answer of every group, ordered by group.

        A pair in which one answer has no loss token, or whose weight is 0, is left out.

        Raises:
            DataError: A group is not one chosen and one rejected sequence of the same weight.
        """
        chosen, rejected = (self._by_group(role) for role in ("chosen", "rejected"))
        has_duplicates = len(set(self.groups[chosen].tolist())) < len(chosen)
        if has_duplicates or not torch.equal(self.groups[chosen], self.groups[rejected]):
            self._refuse_incomplete(chosen, rejected)
        if not torch.equal(self.weights[chosen], self.weights[rejected]):
            group = int(self.groups[chosen][self.weights[chosen] != self.weights[rejected]][0])
            raise agreed_fault(
                f"the two sequences of group {group} have different weights; give both the pair's weight"
            )
        whole = self._counts[chosen] & self._counts[rejected]
        return Pairs(self._at(chosen[whole]), self._at(rejected[whole]))

    def value_of_pairs(self, losses: Tensor, pairs: Pairs, rewards: tuple[Tensor, Tensor]) -> PreferenceValue:
        """Returns the weighted mean of the losses, [pairs] float64, as sums; rewards of chosen and rejected answers
        make the usual diagnostics."""
        weights = pairs.weights
        chosen, rejected = (reward.detach() for reward in rewards)
        seen = {
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).double(),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        shares = torch.zeros_like(self.weights).index_put((pairs.chosen.index,), weights)
        sums = {name: ((weights * values).sum(), weights.sum()) for name, values in seen.items()}
        return PreferenceValue((weights * losses).sum(), shares, sums)

    @property
    def _counts(self) -> Tensor:
        return (self.lengths > 0) & (self.weights > 0)

    def _at(self, index: Tensor) -> Answers:
        # a missing reference is nan; a loss that needs it was refused before
        reference = self.reference[index].nan_to_num(nan=0.0)
        margins = torch.zeros_like(self.weights) if self.margins is None else self.margins
        of_index = (values[index] for values in (self.lengths, self.weights, margins))
        return Answers(index, self.scores[index], reference, *of_index)

    def _by_group(self, role: Role) -> Tensor:
        index = torch.nonzero(self.roles == ROLES.index(role)).flatten()
        return index[torch.argsort(self.groups[index], stable=True)]

    def _refuse_incomplete(self, chosen: Tensor, rejected: Tensor) -> None:
        ours, theirs = self.groups[chosen].tolist(), self.groups[rejected].tolist()
        wrong = next(group for group in sorted({*ours, *theirs}) if ours.count(group) != 1 or theirs.count(group) != 1)
        raise agreed_fault(
            f"group {wrong} has {ours.count(wrong)} chosen and {theirs.count(wrong)} rejected sequences, but a pair "
            "is one of each; give both in the same call, each group with its own number"
        )


def agreed_fault(message: str) -> DataError:
    """Makes an error that every rank raises, found in vectors that are the same on all ranks."""
    error = DataError(message)
    error.on_every_rank = True
    return error


PreferenceLoss = Callable[[ScoredSequences], PreferenceValue]
Function = TypeVar("Function", bound=Callable[..., PreferenceValue])


class PreferenceMarks(NamedTuple):
    """Marks of `preference_loss`."""

    needs_reference: bool
    couples_groups: bool
    scores_by_head: bool


def preference_loss(
    needs_reference: bool, couples_groups: bool = False, scores_by_head: bool = False
) -> Callable[[Function], Function]:
    """Marks a function (ScoredSequences, **options) -> PreferenceValue as a loss of whole sequences.

    Args:
        couples_groups: Whether the loss of a group depends on the others of its batch; a step is then one call of
            `Engine.forward_backward`.
        scores_by_head: Whether a score is the number that a head (`model.num_labels`: 1) computes from the sequence.
    """

    def mark(function: Function) -> Function:
        function.__dict__["preference_marks"] = PreferenceMarks(needs_reference, couples_groups, scores_by_head)
        return function

    return mark


def preference_marks(function: Callable[..., Any]) -> PreferenceMarks | None:
    """Returns the marks of a function, with or without bound options; None if it is not a preference loss."""
    return getattr(getattr(function, "func", function), "preference_marks", None)


@per_token
def score_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the log-probabilities of the labels.

    The gradient is that of the preference loss if each sequence's weights are multiplied by the derivative by its
    score; the value is not.
    """
    return weigh(-inputs.logits.cross_entropy(inputs.labels), inputs)


@per_token
def head_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the scores that a head of one label gives; see `score_term`."""
    # log(exp(x)) = x exactly, as exponentials are relative to the largest one
    return weigh(inputs.logits.logsumexp(), inputs)
