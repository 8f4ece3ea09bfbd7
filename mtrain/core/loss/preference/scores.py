"""The contract of a preference loss: a function of the scores of all sequences of a global batch.

A score is the sum (loss.aggregation=seq-mean-token-sum) or the mean (seq-mean-token-mean) of the log-probabilities of a
sequence's loss tokens. A first forward pass computes the scores of the whole batch on all ranks. The loss and its
derivative by each score are then functions of a few short float64 vectors, the same on every rank. A second pass
multiplies the weight of each token by the derivative of its sequence, which gives the exact gradient
(`mtrain/core/step/scoring_pass.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtrain.base.errors import DataError
from mtrain.base.spelling import counted
from mtrain.core.loss.pair import LossPair, TermInputs, per_token, weigh
from mtrain.core.loss.preference.member import ROLES, Role

SUM_AND_SUM = tuple[Tensor, Tensor]
"""A diagnostic as two scalars, a sum over the batch and its divisor."""


class PreferenceValue(NamedTuple):
    """Result of a preference loss for a batch; undivided sums, like those of every loss."""

    numerator: Tensor
    """Sum of weight x loss, float64 scalar with a graph."""
    shares: Tensor
    """Share of each sequence in the denominator, [sequences] float64."""
    diagnostics: dict[str, SUM_AND_SUM]


@dataclass(frozen=True)
class Answers:
    """A selection of n sequences of a batch; each field is [n], float64 unless stated otherwise."""

    index: Tensor
    """Positions of the answers among all sequences, int64."""
    scores: Tensor
    """Scores under the model, with a graph."""
    reference: Tensor
    """Scores under the reference model; 0 if the loss needs none."""
    lengths: Tensor
    """Sum of each answer's token weights."""
    weights: Tensor
    margins: Tensor
    """Margins by which labels rate answers above their counterparts; 0 if the data have none."""

    @property
    def ratios(self) -> Tensor:
        """Returns the log of the likelihood ratio of model to reference model."""
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
    """Scores under the reference model, float64; nan for a sequence without one."""
    lengths: Tensor
    """Sum of each sequence's token weights, float64; 0 for a sequence without loss tokens."""
    weights: Tensor
    """Weights of the samples, float64."""
    groups: Tensor
    """Group of each sequence, int64."""
    roles: Tensor
    """Role of each sequence as an index into `ROLES`, int64."""
    margins: Tensor | None = None
    """Margins as in `Answers`, float64; None if the data have none."""

    def of(self, role: Role) -> Answers:
        """Returns the sequences of a role that have a loss token and a weight above 0."""
        return self._at(torch.nonzero(self._counts & (self.roles == ROLES.index(role))).flatten())

    def pairs(self) -> Pairs:
        """Returns the chosen and the rejected answer of every group, ordered by group.

        Leaves out pairs of weight 0 and pairs with an answer that has no loss token.

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
        both_count = self._counts[chosen] & self._counts[rejected]
        return Pairs(self._at(chosen[both_count]), self._at(rejected[both_count]))

    def value_of_pairs(self, losses: Tensor, pairs: Pairs, rewards: tuple[Tensor, Tensor]) -> PreferenceValue:
        """Returns the weighted mean of the losses, [pairs] float64, as undivided sums, with the usual diagnostics of
        the rewards of chosen and rejected answers."""
        weights = pairs.weights
        chosen, rejected = (reward.detach() for reward in rewards)
        diagnostics = {
            "reward_margin": chosen - rejected,
            "reward_accuracy": (chosen > rejected).double(),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        shares = torch.zeros_like(self.weights).index_put((pairs.chosen.index,), weights)
        sums = {name: ((weights * values).sum(), weights.sum()) for name, values in diagnostics.items()}
        return PreferenceValue((weights * losses).sum(), shares, sums)

    @property
    def _counts(self) -> Tensor:
        return (self.lengths > 0) & (self.weights > 0)

    def _at(self, index: Tensor) -> Answers:
        # a missing reference is nan; `preference_pass` has refused it if the loss needs it
        reference = self.reference[index].nan_to_num(nan=0.0)
        margins = torch.zeros_like(self.weights) if self.margins is None else self.margins
        selected = (values[index] for values in (self.lengths, self.weights, margins))
        return Answers(index, self.scores[index], reference, *selected)

    def _by_group(self, role: Role) -> Tensor:
        index = torch.nonzero(self.roles == ROLES.index(role)).flatten()
        return index[torch.argsort(self.groups[index], stable=True)]

    def _refuse_incomplete(self, chosen: Tensor, rejected: Tensor) -> None:
        chosen_groups, rejected_groups = self.groups[chosen].tolist(), self.groups[rejected].tolist()
        incomplete = next(
            group
            for group in sorted({*chosen_groups, *rejected_groups})
            if chosen_groups.count(group) != 1 or rejected_groups.count(group) != 1
        )
        num_chosen, num_rejected = chosen_groups.count(incomplete), rejected_groups.count(incomplete)
        raise agreed_fault(
            f"group {incomplete} has {num_chosen} chosen and {counted(num_rejected, 'rejected sequence')}, but a pair "
            "is one of each; give both in the same call, each group with its own number"
        )


def agreed_fault(message: str) -> DataError:
    """Makes an error that every rank raises, because it follows from vectors that are the same on all ranks."""
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
        needs_reference: Whether sequences need a score under a reference model.
        couples_groups: Whether the loss of a group depends on other groups in the batch; a step must then be one call
            of `Engine.forward_backward`.
        scores_by_head: Whether the score of a sequence is the output of a head (`model.num_labels`: 1).
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
    """Weighs and sums the negative log-probabilities of the labels.

    If the weights of each sequence are multiplied by the derivative of a preference loss by its score, the gradient is
    that of the preference loss. The value has no meaning.
    """
    return weigh(-inputs.logits.cross_entropy(inputs.labels), inputs)


@per_token
def head_term(inputs: TermInputs) -> LossPair:
    """Weighs and sums the outputs of a head of one label; see `score_term`."""
    # log(exp(x)) = x exactly, since exponentials are relative to the largest one
    return weigh(inputs.logits.logsumexp(), inputs)
