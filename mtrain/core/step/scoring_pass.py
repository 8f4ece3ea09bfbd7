"""First of the two passes of a preference loss: scores of all sequences, the loss, its derivative by each score.

The loss of a pair depends on two sequences, which may be in different rows, microbatches and data-parallel ranks. So a
forward pass without a gradient computes every sequence's score, one all-reduce gives all ranks all scores, and each
rank computes the same loss and derivatives from them. The second pass is an ordinary one, in which a token's weight is
multiplied by the derivative of its sequence. Both passes use the same weights and no dropout, so the gradient is exact
under any layout, packing and micro-batch size.
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
    """Diagnostics by name: a sum, and its divisor."""

    def plus(self, other: PreferenceTotals) -> PreferenceTotals:
        """Adds the totals of other batches."""
        sums = dict(self.diagnostics)
        for name, (numerator, denominator) in other.diagnostics.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + numerator, before[1] + denominator)
        return PreferenceTotals(self.numerator + other.numerator, self.denominator + other.denominator, sums)

    @property
    def means(self) -> dict[str, float]:
        """Returns the mean of each diagnostic whose divisor is not 0."""
        return {name: one / other for name, (one, other) in self.diagnostics.items() if other}


class PreferencePass(NamedTuple):
    """Result of the first pass."""

    batches: list[Microbatch] | None
    """Microbatches for the second pass; None on ranks that do not read data."""
    totals: PreferenceTotals


_COLUMNS = ("score", "is_there", "reference", "has_reference", "length", "weight", "group", "role", "margin")
"""Columns of the table that all ranks fill together, one line for each slot of the global batch; group -1 means
none."""


@dataclass(frozen=True)
class SlotScores(ScoredSequences):
    """Scored sequences of a batch, with the slot of each."""

    slots: tuple[int, ...] = ()


def preference_pass(
    model: RankModel, objective: Objective, batches: Sequence[Microbatch] | None, num_microbatches: int | None
) -> PreferencePass:
    """Scores a global batch, forward only, and weighs its tokens for the second pass. Collective over the world.

    Two all-reduces: one number, and nine numbers per sequence. The host waits for the device after each. Parameters are
    gathered first, and the model runs without dropout. Batches are the full rows of this data-parallel rank, None on
    ranks that do not read data; `num_microbatches` is None if these do not know it.

    Raises:
        DataError: A sequence belongs to no group, a group is not complete, or a reference score is missing.
    """
    loss = objective.preference
    assert loss is not None
    found = sequence_scores(model, batches, num_microbatches, objective.choices)
    marks = preference_marks(loss)
    if marks is not None and marks.needs_reference:
        _check_references(found)
    with torch.enable_grad():
        scores = found.scores.requires_grad_()
        value = loss(replace(found, scores=scores))
        (derivatives,) = torch.autograd.grad(value.numerator, scores, allow_unused=True)
    if derivatives is None:
        derivatives = torch.zeros_like(scores)
    diagnostics = {name: (float(one), float(other)) for name, (one, other) in value.diagnostics.items()}
    totals = PreferenceTotals(value.numerator.item(), value.shares.sum().item(), diagnostics)
    if batches is None:
        return PreferencePass(None, totals)
    values = zip(derivatives.tolist(), value.shares.tolist())
    of_slot = dict(zip(found.slots, values))  # slot -> derivative of its score, share of the denominator
    return PreferencePass([_weighed(batch, of_slot) for batch in batches], totals)


def sequence_scores(
    model: RankModel,
    batches: Sequence[Microbatch] | None,
    num_microbatches: int | None,
    choices: Sequence[str] = (),
) -> SlotScores:
    """Returns the score of every sequence of a global batch under the current weights; the same on all ranks.

    The arguments are those of `preference_pass`. Raises DataError where a sequence belongs to no group.
    """
    model.sharded.gather_parameters()
    config, groups = model.config, model.groups
    own = [] if batches is None else list(batches)
    # ranks that receive their rows know neither how many sequences there are nor which they hold
    highest = max((member.slot + 1 for batch in own for member in _present(batch)), default=0)
    size = to_device(torch.tensor(highest), groups.device)
    dist.all_reduce(size, op=dist.ReduceOp.MAX)
    table = to_device(_known(own if groups.counts_planned else [], int(size)), groups.device)
    shared = broadcast_batches(batches, num_microbatches, (MAIN_TERM,), config, groups, choices)
    rows = [replace(batch, mtp=()) for batch in slice_for_rank(shared, groups)]
    numbers = itertools.count()

    def take(logits: Logits, batch: Microbatch) -> None:
        sums = _sums(score_summands(logits, batch, config, groups), batch)
        number = next(numbers)
        # otherwise every tensor-parallel rank would add the same numbers
        if groups.counts_loss:
            members = own[number].members
            places = [place for place, member in enumerate(members) if member is not None]
            slots = [member.slot for member in members if member is not None]
            index = to_device(torch.tensor([slots, places], dtype=torch.int64), groups.device)
            table[:, _COLUMNS.index("score")].index_add_(0, index[0], sums[index[1]])

    with torch.no_grad(), evaluating(model.chunks):
        run_forward(model.chunks, rows, take, config)
    dist.all_reduce(table)
    found = _read(table.cpu())
    _check_members(found)
    return found


def _present(batch: Microbatch) -> list[PlacedMember]:
    return [member for member in batch.members if member is not None]


def _sums(log_probs: Tensor, batch: Microbatch) -> Tensor:
    """Returns this rank's part of each score, [num_sequences] float64."""
    weights = batch.weights[MAIN_TERM]
    # where, not a product: the log-probability of a masked token may be inf
    kept = torch.where(weights != 0, log_probs.double() * weights.double(), 0.0)
    if batch.sequence_ids is None:
        return kept.sum(dim=1)
    return sum_by_sequence(kept, PackedSequences(batch.sequence_ids, batch.num_sequences))


def _known(batches: Sequence[Microbatch], size: int) -> Tensor:
    """Returns the table on the CPU, [size, columns], with the facts of this rank's sequences, except scores; 0
    elsewhere."""
    table = torch.zeros(size, len(_COLUMNS), dtype=torch.float64)
    for batch in batches:
        for placed in _present(batch):
            table[placed.slot] = torch.tensor(_line_of(placed), dtype=torch.float64)
    return table


def _line_of(placed: PlacedMember) -> list[float]:
    member = placed.member
    if member is None:
        return [0.0, 1.0, 0.0, 0.0, placed.length, placed.weight, -1, 0, 0.0]
    reference = [0.0, 0.0] if member.reference is None else [member.reference, 1.0]
    # numbers of groups are exact below 2^53
    group = [member.group, ROLES.index(member.role), member.margin]
    return [0.0, 1.0, *reference, placed.length, placed.weight, *group]


def _read(table: Tensor) -> SlotScores:
    slots = torch.nonzero(table[:, _COLUMNS.index("is_there")]).flatten()
    found = dict(zip(_COLUMNS, table[slots].unbind(1), strict=True))
    return SlotScores(
        scores=found["score"],
        reference=torch.where(found["has_reference"] > 0, found["reference"], torch.nan),
        lengths=found["length"],
        weights=found["weight"],
        groups=found["group"].long(),
        roles=found["role"].long(),
        margins=found["margin"],
        slots=tuple(slots.tolist()),
    )


def _check_members(found: SlotScores) -> None:
    alone = torch.nonzero(found.groups < 0).flatten().tolist()
    if alone:
        raise agreed_fault(
            f"sample {found.slots[alone[0]]} of the batch belongs to no group, but the loss compares sequences of "
            "groups; give Datum.member, or data of chosen and rejected answers"
        )


def _check_references(found: SlotScores) -> None:
    missing = torch.nonzero(~found.reference.isfinite()).flatten().tolist()
    if missing:
        raise agreed_fault(
            f"sample {found.slots[missing[0]]} of the batch has no finite reference score, but the loss compares with "
            "a reference model; give GroupMember.reference, as Engine.scores of that model gives it"
        )


def _weighed(batch: Microbatch, of_slot: Mapping[int, tuple[float, float]]) -> Microbatch:
    """Returns the batch with weights that give its main term the gradient and the denominator of the loss."""
    nothing = (0.0, 0.0)
    known = [nothing if member is None else of_slot[member.slot] for member in batch.members]
    derivatives, shares = torch.tensor(known, dtype=torch.float64).unbind(1)
    ids = batch.sequence_ids
    if ids is None:
        ids = torch.arange(len(batch.tokens)).unsqueeze(1).expand(batch.tokens.shape)
    # the first position of each sequence carries its share
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    weights = batch.weights[MAIN_TERM].double() * derivatives[ids]
    return replace(
        batch,
        weights=batch.weights | {MAIN_TERM: weights.float()},
        denominator_weights=batch.denominator_weights | {MAIN_TERM: torch.where(is_first, shares[ids], 0.0)},
    )
