"""Normalisations of other trainers as loss functions: the sums of each pair over ranks and microbatches equal theirs.

They are named with `loss.denominator=measured`, since their denominators differ from those that the masks give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config import Config
from mtrain.core.loss.functions.policy import ppo_loss
from mtrain.core.loss.pair import LossPair, TermInputs, needs_extras
from mtrain.core.ranks.groups import Groups
from tests.parity.batches import GlobalBatch
from tests.parity.ranks import Outcome, Run, train

_groups: list[Groups] = []


def train_naively(
    groups: Groups, config: Config, parameters: Mapping[str, Any] | None, batches: Sequence[GlobalBatch]
) -> Outcome:
    """Runs `ranks.train` for loss functions that need the process groups."""
    _groups[:] = [groups]
    return train(groups, config, parameters, batches)


def mean_of_micro_steps(inputs: TermInputs) -> LossPair:
    """Averages over the tokens of all ranks in each micro-step; the micro-steps are averaged (verl's SFT trainer)."""
    losses, counts = _sums(inputs)
    everyone = counts.clone()
    dist.all_reduce(everyone, group=_groups[0].dp_cp)
    ranks = _groups[0].dp_cp.size()
    return LossPair(losses / everyone.clamp(min=1).float(), _scalar(1 / ranks))


def mean_of_means(inputs: TermInputs) -> LossPair:
    """Averages over a rank's tokens of a microbatch, then over microbatches and ranks (TorchTNT, DDP)."""
    losses, counts = _sums(inputs)
    return LossPair(losses / counts.clamp(min=1).float(), _scalar(1.0))


def mean_times_sequence_ranks(inputs: TermInputs) -> LossPair:
    """Averages over a rank's slice; the ranks' gradients are summed and divided by dp alone (DeepSpeed-Ulysses)."""
    losses, counts = _sums(inputs)
    return LossPair(losses / counts.clamp(min=1).float(), _scalar(1 / _groups[0].layout.cp))


def mean_of_sequence_means(inputs: TermInputs) -> LossPair:
    """Averages over a rank's sequences of a microbatch, then over microbatches and ranks."""
    losses, _ = _sums(inputs)
    return LossPair(losses / _sequences_in_sight(inputs).clamp(min=1).float(), _scalar(1.0))


def sequences_in_sight(inputs: TermInputs) -> LossPair:
    """Counts, on every rank, the sequences of which it holds a loss token, so a cut sequence counts several times."""
    return LossPair(_sums(inputs)[0], _sequences_in_sight(inputs))


def sequences_times_ranks(inputs: TermInputs) -> LossPair:
    """Multiplies the number of sequences by dp, instead of the loss (verl)."""
    return LossPair(_sums(inputs)[0], inputs.denominator_weights.sum() * _groups[0].layout.dp)


def _sums(inputs: TermInputs) -> tuple[Tensor, Tensor]:
    """Sums a rank's token losses and loss tokens; weights are 0 or 1."""
    losses = torch.where(inputs.weights != 0, inputs.logits.cross_entropy(inputs.labels), 0.0)
    return losses.sum(), (inputs.weights != 0).sum(dtype=torch.float64)


def _sequences_in_sight(inputs: TermInputs) -> Tensor:
    return (inputs.weights != 0).any(dim=1).sum(dtype=torch.float64)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@needs_extras("advantages", "old_logprobs")
def policy_mean_of_means(inputs: TermInputs) -> LossPair:
    """Averages each rank's microbatch over tokens, then over microbatches and ranks (verl before its pull request
    906)."""
    return LossPair(ppo_loss(inputs).numerator / _tokens(inputs), _scalar(1.0))


@needs_extras("advantages", "old_logprobs")
def policy_weighted_by_samples(inputs: TermInputs) -> LossPair:
    """Averages each rank's microbatch over tokens, weighted by its samples."""
    samples = len(inputs.weights)
    return LossPair(ppo_loss(inputs).numerator / _tokens(inputs) * samples, _scalar(samples))


@needs_extras("advantages", "old_logprobs")
def policy_sequences_times_ranks(inputs: TermInputs) -> LossPair:
    """Divides the mean over sequences once more by dp (verl's pull request 4510)."""
    pair = ppo_loss(inputs)
    return LossPair(pair.numerator, pair.denominator * _groups[0].layout.dp)


def _tokens(inputs: TermInputs) -> Tensor:
    return (inputs.weights != 0).sum().clamp(min=1).float()


def train_each_naively(groups: Groups, runs: Sequence[Run]) -> list[Outcome]:
    """Runs `ranks.train_each` in the same way."""
    return [train_naively(groups, *run) for run in runs]
