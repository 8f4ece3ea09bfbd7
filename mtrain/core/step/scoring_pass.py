"""The first of the two passes of a preference loss: scores of all sequences, the loss, its derivative by each score.

The loss of a pair depends on two sequences, which may be in different rows, microbatches and data-parallel ranks.
Therefore a forward pass without gradients computes the score of every sequence, one all-reduce gives all scores to all
ranks, and each rank computes the same loss and derivatives from them. The second pass is an ordinary training pass in
which the weight of each token is multiplied by the derivative of its sequence. Both passes use the same weights and no
dropout, so the gradient is exact under any layout, packing and micro-batch size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain.config.schema.loss import MAIN_TERM
from mtrain.core.batch.batch import Microbatch, PlacedMember
from mtrain.core.engine.rank_model import RankModel
from mtrain.core.engine.schedule import evaluating, run_forward
from mtrain.core.layers.output_layer import Logits
from mtrain.core.loss.objective import Objective
from mtrain.core.loss.preference.member import ROLES
from mtrain.core.loss.preference.scores import ScoredSequences, agreed_fault, preference_marks
from mtrain.core.loss.sequences import PackedSequences, sum_by_sequence
from mtrain.core.ranks.broadcast import broadcast_batches, slice_for_rank
from mtrain.core.ranks.groups import to_device
from mtrain.core.step.loss import score_summands


@dataclass(frozen=True)
class PreferenceTotals:
    """Totals of a preference loss over some global batches, the same on all ranks."""

    numerator: float = 0.0
    denominator: float = 0.0
    diagnostics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Diagnostics by name, each as a sum and its divisor."""

    def plus(self, other: PreferenceTotals) -> PreferenceTotals:
        """Returns the sum of these totals and those of other batches."""
        sums = dict(self.diagnostics)
        for name, (numerator, denominator) in other.diagnostics.items():
            old_numerator, old_denominator = sums.get(name, (0.0, 0.0))
            sums[name] = (old_numerator + numerator, old_denominator + denominator)
        return PreferenceTotals(self.numerator + other.numerator, self.denominator + other.denominator, sums)

    @property
    def means(self) -> dict[str, float]:
        """Returns the mean of each diagnostic whose divisor is not 0."""
        return {name: numerator / divisor for name, (numerator, divisor) in self.diagnostics.items() if divisor}


class PreferencePass(NamedTuple):
    """Result of the scoring pass."""

    batches: list[Microbatch] | None
    """Microbatches for the second pass; None on ranks that do not read data."""
    totals: PreferenceTotals


_COLUMNS = ("score", "is_there", "reference", "has_reference", "length", "weight", "group", "role", "margin")
"""Columns of the table that all ranks fill together, with one line per slot of the global batch. A sequence without a
group has group -1."""


@dataclass(frozen=True)
class SlotScores(ScoredSequences):
    """Scored sequences of a batch, with their slots."""

    slots: tuple[int, ...] = ()


def preference_pass(
    model: RankModel, objective: Objective, batches: Sequence[Microbatch] | None, num_microbatches: int | None
) -> PreferencePass:
    """Scores a global batch, forward only, and weighs its tokens for the second pass. Collective over the world.

    Two all-reduces, one of a single number and one of nine numbers per sequence; the host waits for the device after
    each. Parameters are gathered first, and the model runs without dropout.

    Args:
        batches: Full rows of this data-parallel rank; None on ranks that do not read data.
        num_microbatches: Number of microbatches of this data-parallel rank; None if only ranks with batches know.

    Raises:
        DataError: A sequence belongs to no group, a group is incomplete, or a reference score is missing.
    """
    loss = objective.preference
    assert loss is not None
    sequences = sequence_scores(model, batches, num_microbatches, objective.choices)
    marks = preference_marks(loss)
    if marks is not None and marks.needs_reference:
        _check_references(sequences)
    with torch.enable_grad():
        scores = sequences.scores.requires_grad_()
        value = loss(replace(sequences, scores=scores))
        (derivatives,) = torch.autograd.grad(value.numerator, scores, allow_unused=True)
    if derivatives is None:
        derivatives = torch.zeros_like(scores)
    diagnostics = {name: (float(numerator), float(divisor)) for name, (numerator, divisor) in value.diagnostics.items()}
    totals = PreferenceTotals(value.numerator.item(), value.shares.sum().item(), diagnostics)
    if batches is None:
        return PreferencePass(None, totals)
    values = zip(derivatives.tolist(), value.shares.tolist())
    by_slot = dict(zip(sequences.slots, values))  # slot -> derivative of its score, share of the denominator
    return PreferencePass([_reweighted(batch, by_slot) for batch in batches], totals)


def sequence_scores(
    model: RankModel,
    batches: Sequence[Microbatch] | None,
    num_microbatches: int | None,
    choices: Sequence[str] = (),
) -> SlotScores:
    """Returns the score of every sequence of a global batch under the current weights; the same on all ranks.

    Takes the arguments of `preference_pass`; `choices` names the data that layers read, as in `Objective.choices`.

    Raises:
        DataError: A sequence belongs to no group.
    """
    model.sharded.gather_parameters()
    config, groups = model.config, model.groups
    local_batches = [] if batches is None else list(batches)
    # ranks that receive their rows by broadcast know neither the number of sequences nor their slots
    highest = max((member.slot + 1 for batch in local_batches for member in _members(batch)), default=0)
    size = to_device(torch.tensor(highest), groups.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    table = to_device(_local_table(local_batches if groups.counts_planned else [], int(size)), groups.device)
    shared = broadcast_batches(batches, num_microbatches, (MAIN_TERM,), config, groups, choices)
    rows = [replace(batch, mtp=()) for batch in slice_for_rank(shared, groups)]
    numbers = itertools.count()

    def add_scores(logits: Logits, batch: Microbatch) -> None:
        sums = _local_scores(score_summands(logits, batch, config, groups), batch)
        number = next(numbers)
        # one rank per tensor-parallel group, since all of them compute the same sums
        if groups.counts_loss:
            members = local_batches[number].members
            positions = [position for position, member in enumerate(members) if member is not None]
            slots = [member.slot for member in members if member is not None]
            index = to_device(torch.tensor([slots, positions], dtype=torch.int64), groups.device)
            table[:, _COLUMNS.index("score")].index_add_(0, index[0], sums[index[1]])

    with torch.no_grad(), evaluating(model.chunks):
        run_forward(model.chunks, rows, add_scores, config)
    dist.all_reduce(table)
    sequences = _scores_of_table(table.cpu())
    _check_members(sequences)
    return sequences


def _members(batch: Microbatch) -> list[PlacedMember]:
    return [member for member in batch.members if member is not None]


def _local_scores(log_probs: Tensor, batch: Microbatch) -> Tensor:
    """Returns this rank's part of the score of each sequence, [num_sequences] float64."""
    weights = batch.weights[MAIN_TERM]
    # where, not a product: the log-probability of a masked token may be inf
    summands = torch.where(weights != 0, log_probs.double() * weights.double(), 0.0)
    if batch.sequence_ids is None:
        return summands.sum(dim=1)
    return sum_by_sequence(summands, PackedSequences(batch.sequence_ids, batch.num_sequences))


def _local_table(batches: Sequence[Microbatch], size: int) -> Tensor:
    """Returns the table, [size, columns] on the CPU, with this rank's sequences without scores; 0 elsewhere."""
    table = torch.zeros(size, len(_COLUMNS), dtype=torch.float64)
    for batch in batches:
        for placed in _members(batch):
            table[placed.slot] = torch.tensor(_table_line(placed), dtype=torch.float64)
    return table


def _table_line(placed: PlacedMember) -> list[float]:
    """Returns the facts of one sequence in the order of `_COLUMNS`, with score 0."""
    member = placed.member
    if member is None:
        return [0.0, 1.0, 0.0, 0.0, placed.length, placed.weight, -1, 0, 0.0]
    reference = [0.0, 0.0] if member.reference is None else [member.reference, 1.0]
    # float64 holds group numbers exactly below 2^53
    group = [member.group, ROLES.index(member.role), member.margin]
    return [0.0, 1.0, *reference, placed.length, placed.weight, *group]


def _scores_of_table(table: Tensor) -> SlotScores:
    """Reads the complete table; slots without a sequence are left out."""
    slots = torch.nonzero(table[:, _COLUMNS.index("is_there")]).flatten()
    columns = dict(zip(_COLUMNS, table[slots].unbind(1), strict=True))
    return SlotScores(
        scores=columns["score"],
        reference=torch.where(columns["has_reference"] > 0, columns["reference"], torch.nan),
        lengths=columns["length"],
        weights=columns["weight"],
        groups=columns["group"].long(),
        roles=columns["role"].long(),
        margins=columns["margin"],
        slots=tuple(slots.tolist()),
    )


def _check_members(sequences: SlotScores) -> None:
    alone = torch.nonzero(sequences.groups < 0).flatten().tolist()
    if alone:
        raise agreed_fault(
            f"sample {sequences.slots[alone[0]]} of the batch belongs to no group, but the loss compares sequences of "
            "groups; give Datum.member, or data of chosen and rejected answers"
        )


def _check_references(sequences: SlotScores) -> None:
    missing = torch.nonzero(~sequences.reference.isfinite()).flatten().tolist()
    if missing:
        slot = sequences.slots[missing[0]]
        raise agreed_fault(
            f"sample {slot} of the batch has no finite reference score, but the loss compares with "
            "a reference model; give GroupMember.reference, as Engine.scores of that model gives it"
        )


def _reweighted(batch: Microbatch, by_slot: Mapping[int, tuple[float, float]]) -> Microbatch:
    """Returns the batch with weights for which its main term has the gradient of the preference loss."""
    zeros = (0.0, 0.0)
    facts = [zeros if member is None else by_slot[member.slot] for member in batch.members]
    derivatives, shares = torch.tensor(facts, dtype=torch.float64).unbind(1)
    ids = batch.sequence_ids
    if ids is None:
        ids = torch.arange(len(batch.tokens)).unsqueeze(1).expand(batch.tokens.shape)
    # the first token of each sequence carries the share of the sequence
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    weights = batch.weights[MAIN_TERM].double() * derivatives[ids]
    return replace(
        batch,
        weights=batch.weights | {MAIN_TERM: weights.float()},
        denominator_weights=batch.denominator_weights | {MAIN_TERM: torch.where(is_first, shares[ids], 0.0)},
    )
